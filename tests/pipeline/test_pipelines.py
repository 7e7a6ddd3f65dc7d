"""Steps of pipelines against the serial program, and against each other: all schedules must give the same bits."""

import collections
import functools
import gc
import re
import threading
import time
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from helpers.data import assert_close
from helpers.models import serially
from helpers.schedules import random_schedule
from helpers.worlds import on_every_worker, on_worker0, wait_until_nobody_takes_part
from hypothesis import HealthCheck, given, settings, strategies as st

import jdistgrad as jd
from jdistgrad import pipeline as pp
from jdistgrad.autograd.contexts import find_context
from jdistgrad.errors import DisagreementError
from jdistgrad.pipeline.batches import sizes_of, split, weighted_sum
from jdistgrad.pipeline.stages import SHARED, StageFunction, StageRecording
from jdistgrad.rpc.scopes import Inbox
from jdistgrad.rpc.worker import current_worker
from jdistgrad.wire import launcher_env
from jdistgrad.wire.message import ANSWERS, CALLS, MessageType

F, B, I, W = pp.Kind  # noqa: E741

WIDTHS = [5, 7, 6, 4, 3, 6, 5]


def make(k):
    draw = np.random.default_rng(k).normal
    shape = WIDTHS[k], WIDTHS[k + 1]
    return {"w": jnp.asarray(draw(size=shape) / 2, jnp.float32), "b": jnp.asarray(draw(size=shape[1:]), jnp.float32)}


def layer(params, x):
    return jnp.tanh(x @ params["w"] + params["b"])


def mean_square(output, target):
    return jnp.mean((output - target) ** 2)


def references(stages, placement):
    return [jd.remote(worker, make, args=(k,)) for k, worker in zip(range(stages), placement, strict=True)]


def data(stages, rows=10):
    draw = np.random.default_rng(0).normal
    return draw(size=(rows, WIDTHS[0])).astype("float32"), draw(size=(rows, WIDTHS[stages])).astype("float32")


def chain(values, x, y):
    for value in values:
        x = layer(value, x)
    return mean_square(x, y)


def gradients(ctx, refs):
    """Return the gradients of references in a context, fetched from their owners."""
    return [jd.rpc_sync(ref.owner, gradient_here, args=(ctx.id, jd.by_reference(ref))) for ref in refs]


def gradient_here(ctx, ref):
    return jd.get_gradients(ctx)[ref]


def stepped(pipeline, refs, *batch, **targets):
    with jd.context() as ctx:
        found = pipeline.step(*batch, **targets)
        return found, jax.tree.map(np.asarray, gradients(ctx, refs))


def schedules(workers, microbatches):
    return {
        "gpipe": pp.gpipe(workers, microbatches),
        "1f1b": pp.one_f_one_b(workers, microbatches),
        "zero bubble": pp.zero_bubble(workers, microbatches),
    }


def same_bits(one, other):
    for a, b in zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True):
        assert a.dtype == b.dtype
        assert a.tobytes() == b.tobytes()


def whitened(_, x):
    return (x - x.mean()) / (1 + x.std())


def settled(_, x):  # JAX has no pullback of a loop of unknown length
    return jax.lax.while_loop(lambda x: jnp.abs(x).max() > 0.5, lambda x: x / 2, x)


def joined_with(params, x, early):
    return layer(params, x + early)


@pytest.mark.parametrize("remat", [False, True])
@on_worker0
def test_stages_before_the_first_parameters_need_no_derivative(world, remat):
    size = jd.world_size()
    refs, (x, y) = [jd.remote(size - 1, make, args=(0,)), jd.remote(0, make, args=(1,))], data(2)
    stages = [
        pp.Stage(whitened),
        pp.Stage(settled, remat=remat),
        pp.Stage(joined_with, refs[0], inputs=(1, 0), remat=remat),
        pp.Stage(layer, refs[1]),
    ]

    def serial(values, x, y):
        early = whitened(None, x)
        return mean_square(layer(values[1], joined_with(values[0], settled(None, early), early)), y)

    expected = jax.value_and_grad(serial)([make(0), make(1)], x, y)
    for schedule in schedules(4, 1).values():
        pipeline = jd.Pipeline(stages, schedule, loss=mean_square, workers=[k % size for k in range(4)])
        assert_close(stepped(pipeline, refs, x, targets=y), expected)


@pytest.mark.parametrize("microbatches", [1, 7])
@on_worker0
def test_schedules_agree_with_the_serial_program_and_to_the_bit_with_each_other(world, microbatches):
    workers = range(jd.world_size())
    refs, (x, y) = references(len(workers), workers), data(len(workers))
    expected = serially(jax.value_and_grad(chain), [make(k) for k in workers], x, y)
    found = [
        stepped(jd.Pipeline([(layer, ref) for ref in refs], schedule, loss=mean_square), refs, x, targets=y)
        for schedule in schedules(len(workers), microbatches).values()
    ]
    for loss, grads in found:
        assert_close((np.asarray(loss), grads), expected)
        same_bits((loss, grads), found[0])


@on_worker0
def test_chunks_and_placements_give_the_same_bits(world):
    """Six stages: in chunks on all workers, in a V, and all on the last worker alone."""
    last, stages = jd.world_size() - 1, 6
    x, y = np.random.default_rng(0).normal(size=(2, 10, WIDEST)).astype("float32")
    placements = {"one": [last] * stages}
    orders = {"one": pp.interleaved(1, 4, stages)}
    if jd.world_size() == 3:
        placements |= {"chunks": [0, 1, 2, 0, 1, 2], "v": [0, 1, 2, 2, 1, 0]}
        orders |= {"chunks": pp.interleaved(3, 4, 2), "v": pp.zbv(3, 4)}
    found = []
    for name, placement in placements.items():
        refs = [jd.remote(worker, square_of, args=(k,)) for k, worker in enumerate(placement)]
        pipeline = jd.Pipeline([(COMBINE[WIDEST], ref) for ref in refs], orders[name], loss=mean_square)
        found.append(stepped(pipeline, refs, x, targets=y))
        same_bits(found[-1], found[0])
    assert_close(found[0][1], serially(jax.grad(combined_in_turn), [square_of(k) for k in range(stages)], x, y))


def combined_in_turn(values, x, y):
    return mean_square(functools.reduce(lambda x, value: COMBINE[WIDEST](value, x), values, x), y)


def mix(params, first, second):
    return {"sum": layer(params, first) + second.mean(), "rows": jnp.arange(len(first))}


def finish(params, mixed, tokens, first):
    return layer(params, mixed["sum"] * tokens[:, None]) + first[:, :1]


def skipping(values, tokens, x, y):
    first = layer(values[0], x)
    second = layer(values[1], first)
    mixed = {"sum": layer(values[2], second) + first.mean()}
    return mean_square(layer(values[3], mixed["sum"] * tokens[:, None]) + first[:, :1], y)


def first_of_two(params, tokens, x):
    return layer(params, x)


def finish_with_batch(params, mixed, tokens, x, first):
    return finish(params, mixed, tokens, first)


@on_worker0
def test_stages_feed_any_later_stage_and_take_the_batch_again(world):
    """One row for each microbatch, as the mean over a microbatch is part of the model."""
    rows, n = 5, jd.world_size()
    refs, (x, y) = references(4, [k * n // 4 for k in range(4)]), data(4, rows)
    tokens = np.arange(1, rows + 1)
    stages = [
        pp.Stage(first_of_two, refs[0]),
        pp.Stage(layer, refs[1]),
        pp.Stage(mix, refs[2], inputs=(1, 0)),
        pp.Stage(finish_with_batch, refs[3], inputs=(2, pp.BATCH, 0)),
    ]
    schedule = pp.gpipe(4, rows)
    pipeline = jd.Pipeline(stages, schedule, loss=mean_square, workers=[ref.owner for ref in refs])
    found = stepped(pipeline, refs, tokens, x, targets=y)

    def serial(values):
        return sum(skipping(values, tokens[k : k + 1], x[k : k + 1], y[k : k + 1]) for k in range(rows)) / rows

    assert_close((np.asarray(found[0]), found[1]), serially(jax.value_and_grad(serial), [make(k) for k in range(4)]))


def no_parameters(_, x):
    return jnp.tanh(x)


def loss_and_aux(output, target):
    return mean_square(output, target), {"rows": len(target), "largest": output.max()}


def embedded(tree, x):
    return layer(tree["first"], x @ tree["embedding"])


def unembedded(tree, x):
    own, embedding = tree
    return layer(own, x) @ embedding.T


def embedding(rows, columns):
    return jnp.asarray(np.random.default_rng(7).normal(size=(rows, columns)) / 2, jnp.float32)


@on_worker0
def test_a_stage_takes_a_tree_of_references_so_that_two_stages_tie_their_embeddings(world):
    # One reference of the second stage lies with the first stage; there are integers and a number among the values.
    first, second = 0, jd.world_size() - 1
    tied, count = jd.remote(first, embedding, args=(5, 5)), jd.remote(first, dict, kwargs={"n": 3, "scale": 2.0})
    trees = [
        {"embedding": tied, "first": jd.remote(first, make, args=(0,)), "count": count},
        (jd.remote(second, make_back), tied),
    ]
    stages = [pp.Stage(embedded, trees[0], remat=True), (unembedded, trees[1])]
    x, y = data(1, 6)[0], data(1, 6)[0]
    refs = [tied, trees[0]["first"], trees[1][0]]

    def serial(tied, first, second):
        return mean_square(unembedded((second, tied), embedded({"embedding": tied, "first": first}, x)), y)

    expected = jax.value_and_grad(serial, (0, 1, 2))(*(one.to_here() for one in refs))
    for schedule in schedules(2, 3).values():
        pipeline = jd.Pipeline(stages, schedule, loss=mean_square, workers=(first, second))
        loss, found = stepped(pipeline, refs, x, targets=y)
        assert_close((loss, tuple(found)), expected)


@on_worker0
def test_gradients_of_one_step_without_a_context(world):
    """Every owner has several contributions; a step of an optimizer takes those of the step that it is given."""
    size = jd.world_size()
    tied, others = jd.remote(0, embedding, args=(5, 5)), references(2, [size - 1, size // 2])
    trees = [{"embedding": tied, "first": others[0]}, others[1], tied]
    functions = [embedded, layer, lambda tied, x: x @ jnp.ones((6, 5)) @ tied]
    pipeline = jd.Pipeline(
        list(zip(functions, trees, strict=True)), pp.one_f_one_b(3, 4), loss=mean_square, workers=[0, size // 2, 0]
    )
    assert pipeline.parameters == [tied, *others]
    (x, y), tx = (data(1, 6)[0], data(1, 6)[0]), optax.chain(optax.clip_by_global_norm(0.1), optax.adam(0.1))

    def serial(values):
        tied, first, second = values
        return mean_square(functions[2](tied, layer(second, embedded({"embedding": tied, "first": first}, x))), y)

    for wrap in (jd.on_owners, lambda tx: jd.DistributedOptimizer(tx, pipeline.parameters)):
        params, ours = jd.get(pipeline.parameters), wrap(tx)
        state, there = tx.init(params), None if hasattr(ours, "step") else ours.init(pipeline.parameters)
        for _ in range(3):
            loss, gradients = jax.value_and_grad(serial)(params)
            updates, state = tx.update(gradients, state, params)
            params = optax.apply_updates(params, updates)
            found = pipeline.value_and_grad(x, targets=y)
            assert_close((found[0], jd.get(found[1])), (loss, gradients))
            if there is None:
                ours.step(found[1])
            else:
                updates, there = ours.update(found[1], there, pipeline.parameters)
                jd.tree_map(optax.apply_updates, pipeline.parameters, updates, in_place=True)
        assert_close(jd.get(pipeline.parameters), params, rtol=1e-4)
    del found
    with jd.context() as ctx:
        pipeline.value_and_grad(x, targets=y)
        _, gradients = pipeline.value_and_grad(x, targets=y)
        optimizer = jd.DistributedOptimizer(optax.sgd(1.0), pipeline.parameters)
        optimizer.step(gradients)  # of the second step only
        with pytest.raises(ValueError):
            pipeline.value_and_grad(x[:2], targets=y[:2])
        del ctx
    assert_close(jd.get(pipeline.parameters), jax.tree.map(jnp.subtract, params, jax.grad(serial)(params)), rtol=1e-4)
    wait_until_nobody_takes_part()


def make_back():
    return {"w": jnp.full((7, 5), 0.1), "b": jnp.zeros(5)}


@on_worker0
def test_auxiliary_data_whole_arguments_no_parameters_and_rematerialization(world):
    n, last = jd.world_size(), jd.world_size() - 1
    refs, (x, y) = references(2, [0, last]), data(2, 7)
    mask = np.linspace(0, 1, 7, dtype="float32")
    stages = [
        pp.Stage(masked, refs[0], remat=True),
        pp.Stage(no_parameters),
        pp.Stage(layer, refs[1], remat=True),
    ]
    pipeline = jd.Pipeline(stages, pp.one_f_one_b(3, 3), loss=loss_and_aux, workers=[0, n // 2, last])
    (loss, aux), grads = stepped(pipeline, refs, x, pp.whole(mask), targets=y)

    def serial(values):
        return mean_square(layer(values[1], no_parameters(None, masked(values[0], x, mask))), y)

    assert_close((np.asarray(loss), grads), serially(jax.value_and_grad(serial), [make(0), make(1)]))
    assert [one["rows"] for one in aux] == [3, 2, 2]
    outputs = pipeline.apply(x, pp.whole(mask))
    assert outputs.shape == y.shape
    assert max(float(one["largest"]) for one in aux) == pytest.approx(float(outputs.max()), rel=1e-6)


def zero(output, target):
    return 0.0 * jnp.sum(output) / output.size, target


@on_worker0
def test_auxiliary_data_is_not_the_callers_memory(world):
    refs, x = references(1, [0]), data(1)[0]
    y = np.zeros((len(x), 1 << 14), "float32")
    given = y.view()
    given.flags.writeable = False
    pipeline = jd.Pipeline([(layer, refs[0])], pp.one_f_one_b(1, 3), loss=zero)
    with jd.context():
        _, aux = pipeline.step(x, targets=given)
    y[:] = 1.0
    assert max(float(abs(one).max()) for one in aux) == 0.0


def test_every_kind_of_array_is_split():
    rows = np.arange(14.0).reshape(7, 2)
    given = {
        "numpy": rows,
        "jax": jnp.asarray(rows, jnp.bfloat16),
        "keys": jax.random.split(jax.random.key(0), 7),
        "none": None,
        "whole": pp.whole({"rows": rows}),
    }
    pieces = [one for (one,) in split((given,), sizes_of((given,), (), 3))]
    assert [len(one["jax"]) for one in pieces] == [3, 2, 2]
    for name in ("numpy", "jax"):
        np.testing.assert_array_equal(np.concatenate([one[name] for one in pieces]), given[name])
    drawn = [jax.random.key_data(one["keys"]) for one in pieces]
    np.testing.assert_array_equal(np.concatenate(drawn), jax.random.key_data(given["keys"]))
    assert all(one["whole"]["rows"] is rows and one["none"] is None for one in pieces)


def masked(params, x, mask):
    return layer(params, x) * mask[: WIDTHS[1]]


def wide_loss(output, target):
    for _ in range(4):
        output = jnp.sin(output)
    return jnp.mean((output - target) ** 2)


def test_a_rematerialized_last_stage_keeps_nothing_of_its_loss_either():
    params, (x, y) = make(0), data(1)
    kept = {}
    for remat in (False, True):
        recording = StageRecording(StageFunction(layer, remat, wide_loss), (params, x), (True, True), (y,))
        arrays = [leaf for leaf in jax.tree.leaves(recording._residuals) if np.ndim(leaf)]
        kept[remat] = sum(leaf.nbytes for leaf in arrays)
    assert kept[True] <= sum(leaf.nbytes for leaf in jax.tree.leaves((params, x, y))) < kept[False]


@on_worker0
def test_modules_of_nnx_are_stages_unless_calls_change_them(world):
    last, (x, _) = jd.world_size() - 1, data(1, 8)
    y = np.ones((8, 2), "float32")
    encoder = jd.RemoteModule(0, functools.partial(nnx.Linear, 5, 6), rng=0)
    head = jd.RemoteModule(last, functools.partial(nnx.Linear, 6, 2), rng=1)
    refs = [encoder.parameters, head.parameters]
    loss, found = stepped(jd.Pipeline([encoder, head], pp.one_f_one_b(2, 4), loss=mean_square), refs, x, targets=y)
    output = head(encoder(x))
    assert float(loss) == pytest.approx(float(mean_square(output, y)), rel=1e-5)
    (bias,) = [leaf for leaf in jax.tree.leaves(found[1]) if leaf.ndim == 1]
    np.testing.assert_allclose(bias, np.mean(output - y, axis=0), rtol=1e-4)  # 2 / 2 columns
    assert sorted(leaf.shape for leaf in jax.tree.leaves(found[0])) == [(5, 6), (6,)]
    normalizer = jd.RemoteModule(last, functools.partial(nnx.BatchNorm, 6), rng=2)
    for stage in (normalizer, pp.Stage(normalizer, remat=True)):
        with pytest.raises(TypeError, match="has state that calls change"):
            jd.Pipeline([encoder, stage], pp.one_f_one_b(2, 4), loss=mean_square)


@on_worker0
def test_recordings_are_those_of_the_forecast_and_none_stays(world):
    workers = range(jd.world_size())
    refs, (x, y) = references(len(workers), workers), data(len(workers))
    for schedule in schedules(len(workers), 5).values():
        pipeline = jd.Pipeline([(layer, ref) for ref in refs], schedule, loss=mean_square)
        with jd.context() as ctx:
            pipeline.step(x, targets=y)
            assert [jd.rpc_sync(one, values_in_inbox, args=(ctx.id,)) for one in workers] == [0] * len(workers)
        assert pipeline.report().recordings == list(pp.forecast(schedule, pp.Costs()).recordings)
        assert "forecast" in str(pipeline.report())
        boxes = re.findall(r'<rect stroke=.* x="(.+?)" .* width="(.+?)" .*<title>\d[FBIW]\d: ', pipeline.report().svg())
        assert len(boxes) == sum(map(len, schedule.actions))
        assert all(76 <= float(x) <= float(x) + float(width) < 900 for x, width in boxes)
    wait_until_nobody_takes_part()


_sent = collections.defaultdict(collections.Counter)  # by rank: messages by kind and receiver


def count_messages():
    transport, sent = current_worker().transport, _sent[current_worker().rank]
    send = transport.send
    sent.clear()

    def counted(peer, message):
        if peer != transport.rank:
            sent[message.kind, peer] += 1
        send(peer, message)

    transport.send = counted


def sent_here():
    kinds = CALLS | ANSWERS | {MessageType.PUSH}
    return {to: number for to, number in _sent[current_worker().rank].items() if to[0] in kinds}


@on_worker0
def test_a_step_is_one_call_for_each_worker_and_pushes_between_neighbours(world):
    """The worker that drives a step takes no part in what others send each other."""
    size, microbatches = jd.world_size(), 5
    refs, (x, y) = references(size, range(size)), data(size)
    pipeline = jd.Pipeline([(layer, ref) for ref in refs], pp.one_f_one_b(size, microbatches), loss=mean_square)
    with jd.context():
        pipeline.step(x, targets=y)
        for rank in range(size):
            jd.rpc_sync(rank, count_messages)
        _sent[0].clear()
        pipeline.step(x, targets=y)
        found = {0: sent_here()} | {rank: jd.rpc_sync(rank, sent_here) for rank in range(1, size)}
    for rank in range(size):
        neighbours = {rank - 1, rank + 1} & set(range(size))
        pushed = {(MessageType.PUSH, one): microbatches for one in neighbours}
        if rank == 0:
            assert found[rank] == pushed | {(MessageType.CALL, other): 1 for other in range(1, size)}
        else:  # one answer to the step, and the one to ``count_messages``
            assert found[rank] == pushed | {(MessageType.RESULT, 0): 2}


def values_in_inbox(ctx):
    return len(find_context(ctx).scope.content(Inbox))


def averaging(workers):
    return jd.DataParallel(jd.collectives.of_this_world(workers), timeout=60)


def of_a_replica(rank, size):
    """Run a pipeline whose stages are all on this worker; its replicas are on the others."""
    workers, (x, y) = range(size), data(2, 6 * size)
    refs = references(2, [rank, rank])
    averages = [jd.remote(rank, averaging, args=(list(workers),)) for _ in refs[:1]] * 2
    stages = [pp.Stage(layer, ref, average=average) for ref, average in zip(refs, averages, strict=True)]
    pipeline = jd.Pipeline(stages, pp.interleaved(1, 3, 2), loss=mean_square)
    mine = slice(6 * rank, 6 * rank + 6)
    return stepped(pipeline, refs, x[mine], targets=y[mine])[1], x, y


@on_every_worker
def test_replicas_average_their_gradients(world, rank, size):
    found, x, y = of_a_replica(rank, size)
    assert_close(found, serially(jax.grad(chain), [make(0), make(1)], x, y))


@on_every_worker
def test_stages_of_several_workers_of_the_schedule_share_what_averages_them(world, rank, size):
    """They run beside each other on this worker, but average in one order: the replicas would pair different stages."""
    refs, (x, y) = [jd.RRef({"w": np.eye(4, dtype="float32") * (1 + k)}) for k in range(3)], rows_of_all(size)
    average, mine = jd.remote(rank, averaging, args=(list(range(size)),)), slice(6 * rank, 6 * rank + 6)
    stages = [pp.Stage(product, ref, average=average) for ref in refs]
    pipeline = jd.Pipeline(stages, pp.one_f_one_b(3, 2), loss=mean_square, workers=[rank] * 3)
    values = [ref.local_value() for ref in refs]
    expected = serially(jax.grad(of_products), values, x, y)
    for _ in range(2):
        found = stepped(pipeline, refs, x[mine], targets=y[mine])[1]
        assert_close(found, expected)


def rows_of_all(size):
    random = np.random.default_rng(0)
    return [random.normal(size=(6 * size, 4)).astype("float32") for _ in range(2)]


def product(params, x):
    return jnp.tanh(x @ params["w"])


def of_products(values, x, y):
    return mean_square(functools.reduce(lambda x, params: product(params, x), values, x), y)


_averaged = collections.defaultdict(threading.Event)  # by rank


class Noting(jd.DataParallel):
    """It notes that it has averaged."""

    def average(self, gradients):
        found = super().average(gradients)
        _averaged[self.collectives.rank].set()
        return found


def noting(workers):
    return Noting(jd.collectives.of_this_world(workers), timeout=60)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def after_average(rank, params, x):
    """A layer whose backward pass ends only when another stage's gradients have been averaged."""
    return layer(params, x)


def _wait_for_average(rank, given, g):
    def wait(g):
        assert _averaged[rank].wait(20), "the average has not begun while a stage computes"
        return g

    g = jax.pure_callback(wait, jax.ShapeDtypeStruct(g.shape, g.dtype), g)
    return jax.vjp(layer, *given)[1](g)


after_average.defvjp(lambda rank, params, x: (layer(params, x), (params, x)), _wait_for_average)


@on_every_worker
def test_a_stage_averages_while_another_computes(world, rank, size):
    refs, (x, y) = references(2, [rank, rank]), data(2, 3)
    average = jd.remote(rank, noting, args=(list(range(size)),))
    stages = [(functools.partial(after_average, rank), refs[0]), pp.Stage(layer, refs[1], average=average)]
    _averaged[rank].clear()
    pipeline = jd.Pipeline(stages, pp.interleaved(1, 1, 2), loss=mean_square)
    found = stepped(pipeline, refs, x, targets=y)[1]
    assert_close(found, serially(jax.grad(chain), [make(0), make(1)], x, y))


def unless_odd(params, x):
    if len(x) % 2:
        raise RuntimeError("an odd number of rows")
    return layer(params, x)


@on_every_worker
def test_a_step_that_fails_in_one_replica_is_told_to_the_others(big_world, rank, size):
    """They would wait for it, and average with its next step."""
    ref, average = references(1, [rank])[0], jd.remote(rank, averaging, args=(list(range(size)),))
    pipeline = jd.Pipeline([pp.Stage(unless_odd, ref, average=average)], pp.gpipe(1, 2), loss=mean_square)
    x, y = (np.ones((4, width), "float32") for width in WIDTHS[:2])
    stepped(pipeline, [ref], x, targets=y)
    if rank == 1:
        with jd.context(), pytest.raises(RuntimeError):
            pipeline.step(x[:2], targets=y[:2])
    else:
        with jd.context(), pytest.raises(DisagreementError, match="rank 1 has failed"):
            pipeline.step(x, targets=y)
    with jd.context(), pytest.raises(DisagreementError, match="diverged"):
        pipeline.step(x, targets=y)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def odd_after_average(rank, params, x):
    """A layer whose backward pass fails, for an odd number of rows, once another stage has averaged."""
    return layer(params, x)


def _refuse_odd(rank, given, g):
    if len(g) % 2:
        assert _averaged[rank].wait(20)
        raise RuntimeError("an odd number of rows")
    return jax.vjp(layer, *given)[1](g)


odd_after_average.defvjp(lambda rank, params, x: (layer(params, x), (params, x)), _refuse_odd)


@pytest.mark.parametrize("workers", [1, 2])
@on_every_worker
def test_a_step_that_fails_in_one_replica_after_its_average_is_told_to_the_others_in_the_next(
    big_world, workers, rank, size
):
    """They have taken a step that this one has not. ``workers``: of the schedule, in one share or in two."""
    refs, average = references(2, [rank, rank]), jd.remote(rank, noting, args=(list(range(size)),))
    stages = [
        (functools.partial(odd_after_average, rank), refs[0]),
        pp.Stage(layer, refs[1], average=average),
    ]
    schedule = pp.interleaved(1, 1, 2) if workers == 1 else pp.gpipe(2, 1)
    pipeline = jd.Pipeline(stages, schedule, loss=mean_square, workers=[rank] * workers)
    x, y = (np.ones((4, width), "float32") for width in (WIDTHS[0], WIDTHS[2]))
    stepped(pipeline, refs, x, targets=y)
    _averaged[rank].clear()
    if rank == 1:
        with jd.context(), pytest.raises(RuntimeError):
            pipeline.step(x[:3], targets=y[:3])
    else:
        stepped(pipeline, refs, x, targets=y)
    told = "diverged" if rank == 1 else "rank 1 has failed"
    with jd.context(), pytest.raises(DisagreementError, match=told):
        pipeline.step(x, targets=y)


def finite_averaging(workers):
    return jd.DataParallel(jd.collectives.of_this_world(workers), check_finite=True, timeout=60)


def infinite(params, x):
    return x @ params["w"] / 0.0


@on_every_worker
def test_an_average_that_fails_names_its_stage(world, rank, size):
    refs, average = references(2, [rank, rank]), jd.remote(rank, finite_averaging, args=(list(range(size)),))
    stages = [pp.Stage(layer, refs[0], average=average), pp.Stage(infinite, refs[1], average=average)]
    pipeline, (x, y) = jd.Pipeline(stages, pp.interleaved(1, 2, 2), loss=mean_square), data(2)
    with jd.context(), pytest.raises(jd.NonFiniteError) as found:
        pipeline.step(x, targets=y)
    assert any("In the average of the gradients of stage 1" in note for note in found.value.__notes__)


class Late(jd.DataParallel):
    """It gives up a step late, as on a busy machine."""

    def abandon(self):
        time.sleep(0.5)
        super().abandon()


def averaging_late(workers):
    return Late(jd.collectives.of_this_world(workers), timeout=60)


@pytest.mark.parametrize("stages", [1, 2])
@on_every_worker
def test_the_step_after_a_failed_one_does_not_take_its_place(big_world, stages, rank, size):
    """``stages``: with one ``DataParallel``."""
    refs, average = references(stages, [rank] * stages), jd.remote(rank, averaging_late, args=(list(range(size)),))
    functions = [layer, unless_odd][-stages:]
    given = [pp.Stage(function, ref, average=average) for function, ref in zip(functions, refs, strict=True)]
    pipeline = jd.Pipeline(given, pp.interleaved(1, 2, stages), loss=mean_square)
    x, y = (np.ones((4, width), "float32") for width in (WIDTHS[0], WIDTHS[stages]))
    stepped(pipeline, refs, x, targets=y)  # compiled now, the next one is quick
    if rank == 1:
        with jd.context(), pytest.raises(RuntimeError):
            pipeline.step(x[:2], targets=y[:2])
    told = f"diverged.*rank 1 has failed at bucket 0 in step {stages + 1}"  # the first after ``stages`` averages
    with jd.context(), pytest.raises(DisagreementError, match=told):
        pipeline.step(x, targets=y)


def weak_bias():
    return jnp.full(4, 0.1)  # weakly typed: beside bfloat16, it would be bfloat16


def biased(params, x, mask=1.0):
    return x + params, weak_bias()


def scaled_by_mask(params, given, x, mask):
    return sum(given) * mask


def in_float32(output):
    return jnp.mean(output.astype("float32")), output


@on_worker0
def test_types_do_not_depend_on_the_placement(world):
    """Weak types get lost between processes, not in one."""
    x = np.linspace(0, 1, 24).reshape(6, 4).astype(jnp.bfloat16)
    ref, found = jd.remote(0, weak_bias), []
    stages = [pp.Stage(biased, ref), pp.Stage(scaled_by_mask, None, inputs=(0, pp.BATCH))]
    for first in range(min(jd.world_size(), 2)):
        for second in range(jd.world_size()):
            pipeline = jd.Pipeline(stages, pp.gpipe(2, 2), loss=in_float32, workers=[first, second])
            found.append(stepped(pipeline, [ref], x, pp.whole(weak_bias())))
    assert {aux.dtype for (_, every), _ in found for aux in every} == {np.dtype("float32")}
    for one in found:
        same_bits(one, found[0])


def with_number():
    return {"w": np.arange(3, dtype="float32"), "factor": 2.0, "count": 3}


def times_factor(params, x):
    return x * params["w"] * params["factor"] + params["count"]


@on_worker0
def test_numbers_among_parameters_have_no_gradients(world):
    refs = [jd.remote(k % jd.world_size(), with_number) for k in range(2)]
    pipeline = jd.Pipeline(
        [(times_factor, ref) for ref in refs], pp.gpipe(2, 2), loss=in_float32, workers=[ref.owner for ref in refs]
    )
    optimizer, x = jd.DistributedOptimizer(optax.sgd(1.0), refs), np.ones((4, 3), "float32")
    with jd.context() as ctx:
        pipeline.step(x)
        optimizer.step(ctx)
    first, second = (ref.to_here() for ref in refs)
    w = np.arange(3)
    assert np.allclose(first["w"], w - 2 * (2 * w) / 3)
    assert np.allclose(second["w"], w - 2 * (2 * w + 3) / 3)
    assert (first["factor"], second["count"]) == (2.0, 3)


def with_settings(activation):
    return {"w": np.arange(3, dtype="float32"), "act": activation, "flags": [True, "halved"], "nothing": None}


def by_settings(params, x):
    positive, text = params["flags"]
    found = params["act"](x * params["w"] if positive else -x)
    return found / 2 if text == "halved" else found


@pytest.mark.parametrize("remat", [False, True])
@on_worker0
def test_parameters_may_hold_functions_texts_and_flags(world, remat):
    """As those of calls, for example an equinox module with an activation and a layer of dropout."""
    refs = [jd.remote(k % jd.world_size(), with_settings, args=(one,)) for k, one in enumerate((jnp.sin, jax.nn.relu))]
    stages = [pp.Stage(by_settings, ref, remat=remat) for ref in refs]
    pipeline = jd.Pipeline(stages, pp.gpipe(2, 2), loss=mean_square, workers=[jd.world_size() - 1, 0])
    x, optimizer = np.linspace(-1, 1, 15, dtype="float32").reshape(5, 3), jd.DistributedOptimizer(optax.sgd(1.0), refs)

    def whole(ws):
        first, second = ({**with_settings(act), "w": w} for act, w in zip((jnp.sin, jax.nn.relu), ws, strict=True))
        return mean_square(by_settings(second, by_settings(first, x)), x)

    expected = [np.arange(3, dtype="float32")] * 2
    for _ in range(2):
        loss, gradients = serially(jax.value_and_grad(whole), expected)
        with jd.context() as ctx:
            assert_close(np.asarray(pipeline.step(x, targets=x)), loss)
            optimizer.step(ctx)
        expected = [a - b for a, b in zip(expected, gradients, strict=True)]
    assert_close([ref.to_here()["w"] for ref in refs], expected)
    assert refs[1].to_here()["act"] is jax.nn.relu


def with_constants(params, x):
    return x * params["w"], True, 2, 0.5, np.int8(3)


def by_constants(params, found):
    x, flag, power, factor, small = found
    return jnp.where(flag, x, 0.0) ** power * factor * small, True


def mean_of_first(output):
    return jnp.mean(output[0]), {"flag": output[1]}


@pytest.mark.parametrize("remat", [False, True])
@on_worker0
def test_constants_may_be_among_the_results_of_stages(world, remat):
    ref, x = jd.remote(jd.world_size() - 1, with_number), np.linspace(-1, 1, 15, dtype="float32").reshape(5, 3)
    stages = [pp.Stage(with_constants, ref, remat=remat), pp.Stage(by_constants, None, remat=remat)]
    pipeline = jd.Pipeline(stages, pp.gpipe(2, 2), loss=mean_of_first, workers=[jd.world_size() - 1, 0])
    (loss, aux), (grads,) = stepped(pipeline, [ref], x)

    def whole(w):
        return jnp.mean(1.5 * (x * w) ** 2)

    assert_close((np.asarray(loss), grads["w"]), serially(jax.value_and_grad(whole), with_number()["w"]), rtol=1e-5)
    assert [bool(one["flag"]) for one in aux] == [True, True]


def test_what_is_compiled_lives_as_long_as_its_stage():
    wanted = (True, True)
    kept, shared = StageFunction(functools.partial(layer)), StageFunction(layer)
    compiled, gone = kept.compiled(wanted), weakref.ref(StageFunction(functools.partial(layer)).compiled(wanted))
    assert StageFunction(layer).compiled(wanted) is shared.compiled(wanted)
    for _ in range(SHARED):
        StageFunction(functools.partial(layer)).compiled(wanted)
    gc.collect()
    assert gone() is None
    assert kept.compiled(wanted) is compiled


def drive(pipeline, x, y):
    with jd.context():
        return pipeline.step(x, targets=y)


def report_of(pipeline, x, y):
    drive(pipeline, x, y)
    report = pipeline.report()
    return report, report.costs, report.forecast


@on_worker0
def test_a_pipeline_may_be_driven_from_one_worker_after_the_other(world):
    size = jd.world_size()
    refs, (x, y) = references(3, [k % size for k in range(3)]), data(3)
    pipeline = jd.Pipeline([(layer, ref) for ref in refs], pp.one_f_one_b(3, 2), loss=mean_square)
    found = [drive(pipeline, x, y), *(jd.rpc_sync(k % size, drive, args=(pipeline, x, y)) for k in (1, 2, 1))]
    assert [float(one) for one in found] == [float(found[0])] * 4
    report, costs, forecast = jd.rpc_sync(2 % size, report_of, args=(pipeline, x, y))  # what a step took can be sent
    assert (report.costs, report.forecast.spans) == (costs, forecast.spans)


def loss_in_bfloat16(output):
    return jnp.mean(output).astype(jnp.bfloat16)


@on_worker0
def test_losses_of_few_bits_are_summed_in_many(world):
    pipeline = jd.Pipeline([(biased_alone, None)], pp.gpipe(1, 300), loss=loss_in_bfloat16, workers=[0])
    loss = drive(pipeline, np.ones((300, 2), "float32"), None)
    assert (loss.dtype, float(loss)) == (jnp.bfloat16, 1.125)


@on_worker0
def test_a_step_without_backward_passes_returns_the_loss_outside_of_any_context(world):
    refs, (x, y) = references(2, [0, jd.world_size() - 1]), data(2)
    stages, workers = [(layer, ref) for ref in refs], [0, jd.world_size() - 1]
    pipeline = jd.Pipeline(stages, pp.forward_only(2, 3), loss=mean_square, workers=workers)
    assert_close(pipeline.step(x, targets=y), serially(chain, [make(0), make(1)], x, y))
    with jd.context() as ctx:
        pipeline.step(x, targets=y)
        assert jd.get_gradients(ctx) == {}


def test_losses_of_several_dtypes_are_promoted():
    found = weighted_sum([jnp.bfloat16(1.0), jnp.float32(1 + 2**-20)], [0.5, 0.5])
    assert (found, found.dtype) == (np.float32(1 + 2**-21), np.float32)


def biased_alone(params, x):
    return x + 0.125


@on_worker0
def test_a_worker_without_stages_has_nothing_to_do(world):
    schedule = pp.Schedule.parse("0F0,0F1,0B0,0B1\n,\n1F0,1B0,1F1,1B1")
    workers = [0, 1 % jd.world_size(), jd.world_size() - 1]
    refs, (x, y) = references(2, [workers[0], workers[2]]), data(2)
    pipeline = jd.Pipeline([(layer, ref) for ref in refs], schedule, loss=mean_square, workers=workers)
    assert_close(stepped(pipeline, refs, x, targets=y)[1], serially(jax.grad(chain), [make(0), make(1)], x, y))
    report = pipeline.report()
    assert (report.recordings, report.times[1], report.waited[1]) == ([2, 0, 1], [], 0)
    assert "worker 1: computed 0.000 ms" in report.text()
    assert "worker 1" in report.svg()


@st.composite
def models(draw, size):
    """A random pipeline: stages, their widths, who feeds whom, who shares parameters, where they run, and the batch."""
    stages = draw(st.integers(2, 4))
    widths = [draw(st.sampled_from(sorted(COMBINE))) for _ in range(stages)]
    inputs = [None]
    for stage in range(1, stages):
        mine = draw(st.lists(st.integers(0, stage - 1), max_size=2))
        inputs.append((stage - 1, *mine))
    shared = [draw(st.integers(0, stage)) for stage in range(stages)]
    placement = draw(st.permutations([k % size for k in range(stages)]))
    microbatches = draw(st.integers(2, 4))
    rows = microbatches * draw(st.integers(1, 2)) + draw(st.integers(0, 1))
    seeds = draw(st.permutations(range(5)))
    return inputs, shared, widths, placement, microbatches, rows, seeds, draw(st.randoms(use_true_random=False))


WIDEST = 4


def combine(params, *inputs, width):
    """Return a result of this width; inputs may have other widths."""
    widened = [jnp.pad(x, ((0, 0), (0, WIDEST - x.shape[1]))) for x in inputs]
    return jnp.tanh(functools.reduce(jnp.add, widened) @ params)[:, :width]


COMBINE = {width: functools.partial(combine, width=width) for width in (3, WIDEST)}  # compiled once for all examples


def square_of(seed):
    return jnp.asarray(np.random.default_rng(seed).normal(size=(WIDEST, WIDEST)), jnp.float32)


def combined(values, x, y, *, inputs, shared, widths):
    results = []
    for stage, mine in enumerate(inputs):
        taken = [x] if mine is None else [results[k] for k in mine]
        results.append(combine(values[shared[stage]], *taken, width=widths[stage]))
    return mean_square(results[-1], y)


@on_worker0
def test_random_pipelines(world):
    size = jd.world_size()
    owners = [jd.remote(k % size, square_of, args=(k,)) for k in range(5)]

    @settings(max_examples=5, deadline=None, database=None, derandomize=True, suppress_health_check=list(HealthCheck))
    @given(models(size))
    def agree(model):
        inputs, shared, widths, placement, microbatches, rows, seeds, chance = model
        owned = [owners[seed] for seed in seeds]
        x, y = (np.random.default_rng(k).normal(size=(rows, k)).astype("float32") for k in (3, widths[-1]))
        each = zip(widths, shared, inputs, strict=True)
        stages = [pp.Stage(COMBINE[width], owned[k], inputs=mine) for width, k, mine in each]
        used = sorted(set(shared))
        refs, found = [owned[k] for k in used], []
        drawn = random_schedule(chance, inputs, placement, microbatches)
        elsewhere = [chance.randrange(size) for _ in stages]
        plain = pp.gpipe(len(stages), microbatches)
        for schedule, workers in ((plain, placement), (plain, elsewhere), (drawn, range(drawn.workers))):
            pipeline = jd.Pipeline(stages, schedule, loss=mean_square, workers=workers)
            found.append(stepped(pipeline, refs, x, targets=y))
            same_bits(found[-1], found[0])
        function = functools.partial(combined, inputs=inputs, shared=shared, widths=widths)
        loss, grads = serially(jax.value_and_grad(function), list(map(square_of, seeds)), x, y)
        assert_close((np.asarray(found[0][0]), found[0][1]), (loss, [grads[k] for k in used]), rtol=1e-4, atol=1e-5)

    agree()


def test_the_timeline_shows_the_actions_of_each_worker(world):
    schedule = pp.zero_bubble(world.size, 3)

    def body():
        refs, (x, y) = references(world.size, range(world.size)), data(world.size)
        with jd.context():
            jd.Pipeline([(layer, ref) for ref in refs], schedule, loss=mean_square).step(x, targets=y)

    with jd.timeline() as recorded:
        world.drive(body)
    for worker in [launcher_env.rank()] if launcher_env.launched() else range(world.size):
        names = list(map(str, schedule.actions[worker]))
        pieces = sorted((event.start, event.name) for event in recorded.events if event.rank == worker)
        assert [name for _, name in pieces if name in names] == names
