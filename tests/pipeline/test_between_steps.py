"""What stays from one step to the next, on the workers and in the caller's hands, and what does not."""

import concurrent.futures
import dataclasses
import functools
import threading
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers.worlds import on_worker0

import jdistgrad as jd
from jdistgrad import pipeline as pp
from jdistgrad.autograd.contexts import find_context
from jdistgrad.pipeline.stages import StageFunction, with_settings
from jdistgrad.pipeline.waiting import Averages, StepsHere

_traced = []


def square(width):
    return jnp.eye(width)


def scaled(factor, params, x):
    _traced.append(jd.worker_info().rank)
    return factor * x @ params


def traced():
    return _traced.count(jd.worker_info().rank)


def mean(output, target):
    return jnp.mean(output - target)


def three_stages(functions):
    """Return references to parameters, and a pipeline of stages on the last, the first and the last worker."""
    last = jd.world_size() - 1
    refs = [jd.remote(rank, square, args=(4,)) for rank in (last, 0, last)]
    stages = list(zip(functions, refs, strict=True))
    return refs, jd.Pipeline(stages, pp.one_f_one_b(3, 2), loss=mean, workers=[last, 0, last])


X, Y = np.ones((6, 4), "float32"), np.zeros((6, 4), "float32")


@on_worker0
def test_functions_that_arrive_as_new_objects_are_compiled_once(world):
    """A partial function equals no other; one that came with every step would be compiled in every step."""
    refs, pipeline = three_stages([functools.partial(scaled, factor) for factor in (1.0, 2.0, 3.0)])
    counts = []
    for _ in range(3):
        with jd.context():
            assert float(pipeline.step(X, targets=Y)) == 6.0
        counts.append([jd.rpc_sync(ref.owner, traced) for ref in refs])
    assert counts[0] == counts[1] == counts[2]


def with_partial(factor):
    return {"w": square(4), "scale": functools.partial(multiplied, factor)}


def multiplied(factor, x):
    return factor * x


def by_partial(params, x):
    _traced.append(jd.worker_info().rank)
    return params["scale"](x @ params["w"])


@on_worker0
def test_partial_functions_among_fetched_parameters_are_compiled_once(world):
    """They come with the parameters in every step, as new objects."""
    last, counts = jd.world_size() - 1, []
    refs = [jd.remote(0, with_partial, args=(factor,)) for factor in (2.0, 3.0)]
    pipeline = jd.Pipeline([(by_partial, ref) for ref in refs], pp.gpipe(2, 2), loss=mean, workers=[last, last])
    for _ in range(3):
        with jd.context():
            assert float(pipeline.step(X, targets=Y)) == 6.0
        counts.append(jd.rpc_sync(last, traced))
    assert counts[0] == counts[1] == counts[2]


class Text(str):
    pass


def test_settings_are_told_by_type_and_content():
    gain = Gain(2.0)
    given = [*(functools.partial(multiplied, one) for one in (2.0, 2.0, 3.0)), "a", Text("a"), gain, gain.applied]
    kinds = [jax.tree.structure(with_settings(one)) for one in given]
    assert list(map(kinds.index, kinds)) == [0, 0, 2, 3, 4, 5, 6]


@dataclasses.dataclass(frozen=True)
class Scaled:
    """A stage that equals others of its name, also where it is another function."""

    name: str
    factor: object = dataclasses.field(compare=False)

    def __call__(self, params, x):
        return (self.factor() if callable(self.factor) else self.factor) * x @ params


def test_functions_share_what_is_compiled_where_all_that_they_hold_is_alike():
    first, alike, other = (StageFunction(Scaled("a", factor)) for factor in (2.0, 2.0, 3.0))
    local = [StageFunction(Scaled("a", lambda: 2.0)) for _ in range(2)]  # which cannot be pickled
    wanted = (True, True)
    assert first.compiled(wanted) is alike.compiled(wanted)
    assert first.compiled(wanted) is not other.compiled(wanted)
    assert local[0].compiled(wanted) is not local[1].compiled(wanted)


class Gain:
    def __init__(self, factor):
        self.factor = factor

    def __call__(self, params, x):
        return self.factor * x @ params

    def applied(self, params, x):
        return self.factor * x @ params


@pytest.mark.parametrize("stage_of", [lambda gain: gain, lambda gain: gain.applied], ids=["object", "method"])
@on_worker0
def test_a_new_pipeline_takes_an_object_as_it_is_now_on_all_workers(world, stage_of):
    gain, losses = Gain(2.0), []
    for factor in (2.0, 3.0):
        gain.factor = factor
        _, pipeline = three_stages([stage_of(gain)] * 3)
        with jd.context():
            losses.append(float(pipeline.step(X, targets=Y)))
    assert losses == [8.0, 27.0]


def shares_under_way(ctx):
    here = find_context(ctx).scope.content(StepsHere)
    return len(here.shares) + len(here.averages)


@on_worker0
def test_nothing_of_a_step_stays_in_its_context(world):
    refs, pipeline = three_stages([functools.partial(scaled, 1.0)] * 3)
    with jd.context() as ctx:
        for _ in range(2):
            pipeline.step(X, targets=Y)
        assert [jd.rpc_sync(ref.owner, shares_under_way, args=(ctx.id,)) for ref in refs] == [0, 0, 0]


@pytest.mark.parametrize(("closes", "errors"), [(False, []), (True, [0, 1])])
def test_a_step_goes_on_where_a_worker_beside_it_is_lost(closes, errors):
    """What a share waits for fails by itself. In a context that is closed no stage averages any more."""
    here, by = StepsHere(), SimpleNamespace(average=list)
    with concurrent.futures.ThreadPoolExecutor(1) as turns:
        here.averages[1] = averages = Averages({0: by, 1: by}, turns)
        here.close() if closes else here.give_up(jd.WorkerLostError("another"))
        promises = [averages.begin(stage, [1.0]) for stage in range(2)]
    assert [k for k, one in enumerate(promises) if isinstance(one.exception(), jd.ContextError)] == errors


@pytest.mark.parametrize(
    ("given", "fails", "told"), [([1], False, [0, 1]), ([0, 1], True, [0, 1]), ([0, 1], False, [])]
)
def test_if_a_step_ends_early_each_of_its_stages_is_abandoned_also_one_that_has_averaged(given, fails, told):
    """``fails``: during an average. A stage that cannot be abandoned, as over a mesh, keeps no other from averaging."""
    found = []

    def average(stage, gradients):
        if fails and stage == 1:
            averages.fail()
        return list(gradients)

    def abandon(stage):
        found.append(stage)
        raise jd.CollectiveError("a mesh")

    of = functools.partial
    by = {k: SimpleNamespace(average=of(average, k), abandon=of(abandon, k)) for k in range(2)}
    with concurrent.futures.ThreadPoolExecutor(1) as turns:
        averages = Averages(by, turns)
        promises = [averages.begin(stage, (1.0, 2.0)) for stage in given]
        averages.abandon({0, 1} - {*given})
    averages.close()
    assert found == told
    assert [one.result() for one in promises] == [[1.0, 2.0]] * len(given)


def wide():
    return jnp.asarray(np.random.default_rng(0).normal(size=(2000, 600)) / 50, jnp.float32)


def narrow():
    return jnp.ones((600, 4)) / 600


def layer(params, x):
    return jnp.tanh(x @ params)


def gradient(ctx, ref):
    return jd.get_gradients(ctx)[ref]


@on_worker0
def test_the_caller_may_change_its_arrays_as_soon_as_a_step_has_returned(world):
    """The last backward pass may be under way then, on this worker, with the rows that it was given."""
    refs = [jd.remote(0, wide), jd.remote(jd.world_size() - 1, narrow)]
    placement = [0, jd.world_size() - 1]
    stages = [(layer, ref) for ref in refs]
    pipeline = jd.Pipeline(stages, pp.one_f_one_b(2, 2), loss=mean, workers=placement)
    rows = np.random.default_rng(3).normal(size=(256, 2000)).astype("float32")
    found = []
    for _ in range(12):
        x, y = rows.copy(), np.zeros((256, 4), "float32")
        with jd.context() as ctx:
            pipeline.step(x, targets=y)
            x[:] = 0
            found.append(np.asarray(jd.rpc_sync(0, gradient, args=(ctx.id, jd.by_reference(refs[0])))))
    assert [np.abs(one - found[0]).max() for one in found] == [0] * 12
    assert np.abs(found[0]).max() > 0


@on_worker0
def test_a_failing_apply_leaves_the_context_around_it(world):
    refs, pipeline = three_stages([functools.partial(scaled, 1.0)] * 3)
    with jd.context() as ctx:
        pipeline.step(X, targets=Y)
        with pytest.raises(TypeError):
            pipeline.apply(np.ones((6, 5), "float32"))
        assert not ctx.closed
        found = jd.rpc_sync(refs[0].owner, gradient, args=(ctx.id, jd.by_reference(refs[0])))
        assert np.asarray(found) == pytest.approx(np.full((4, 4), 0.25))
    assert np.asarray(pipeline.apply(X)).tolist() == X.tolist()


_made = threading.Event()


def square_later(width):
    _made.wait(60)
    return square(width)


def make_now():
    _made.set()


@on_worker0
def test_a_step_that_waits_for_parameters_ends_after_its_timeout_and_says_so(world):
    last = jd.world_size() - 1
    refs = [jd.remote(0, square, args=(4,)), jd.remote(last, square_later, args=(4,))]
    function = functools.partial(scaled, 1.0)
    stages = [(function, ref) for ref in refs]
    pipeline = jd.Pipeline(stages, pp.gpipe(2, 2), loss=mean, workers=[0, last], timeout=1.0)
    try:
        if last:
            with pytest.raises(jd.CallTimeoutError) as raised, jd.context():
                pipeline.step(X, targets=Y)
            told = f"worker{last} (rank {last}): waiting for the parameters of stage 1"
            assert told in "\n".join(raised.value.__notes__)
    finally:
        jd.rpc_sync(last, make_now)
    refs[1].to_here()
    with jd.context():
        assert float(jd.Pipeline(stages, pp.gpipe(2, 2), loss=mean, workers=[0, last]).step(X, targets=Y)) == 1.0
