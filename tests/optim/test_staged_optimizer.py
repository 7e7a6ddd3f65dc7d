"""An optimizer's step with given gradients: from Python, and inside a staged step, compared with optax."""

import gc
import operator
import time

import jax
import jax.numpy as jnp
import optax
import pytest
from helpers.data import assert_close
from helpers.programs import X, Y, affine, holding, make_params, references
from helpers.training import distributed_loss, trained_serially, values
from helpers.worlds import last, on_worker0
from jax.experimental import io_callback

import jdistgrad as jd
from jdistgrad.wire import launcher_env

pytestmark = pytest.mark.world(1, 3)


@jax.jit
def squares(params, x):
    return (affine(params, x) ** 2).sum()


def fetched_loss(first, second, x, y):
    return ((affine(first.to_here(), x) + affine(second.to_here(), x) - y) ** 2).sum()


def training_step(optimizer, loss):
    def step(first, second, x):
        value, gradients = jd.value_and_grad(loss, argnums=(0, 1))(first, second, x, Y)
        optimizer.step(gradients)
        return value

    return step


def sent_to(peer, run):
    """Return the names of the calls that worker 0 sends to a worker while ``run`` runs."""
    with jd.timeline() as recorded:
        run()
    calls = [one for one in recorded.events if one.kind == "call" and one.rank == 0]
    return [one.name for one in calls if one.details["to"] == f"worker{peer}"]


@pytest.mark.parametrize(
    ("loss", "staged"), [(distributed_loss, False), (distributed_loss, True), (fetched_loss, True)]
)
@on_worker0
def test_equals_optax_on_one_worker(world, loss, staged):
    refs = references()
    step = training_step(jd.DistributedOptimizer(optax.adam(1e-2), refs), loss)
    step = jd.jit(step) if staged else step
    for k in range(4):
        step(*refs, X + k)
    assert_close(values(refs), trained_serially(optax.adam(1e-2), 4))


@pytest.mark.parametrize(("how", "norm"), [("context", None), ("from Python", 0.5), ("staged", 0.5)])
@on_worker0
def test_a_transformation_that_takes_the_loss_too(world, how, norm):
    # This loss grows from step to step, so the rate is halved.
    plateau = optax.contrib.reduce_on_plateau(factor=0.5, patience=1)
    refs, tx = references(), optax.chain(optax.sgd(0.05), plateau)
    optimizer = jd.DistributedOptimizer(tx, refs, max_global_norm=norm)

    def step(first, second, x):
        value, gradients = jd.value_and_grad(distributed_loss, argnums=(0, 1))(first, second, x, Y)
        optimizer.step(ctx if how == "context" else gradients, value=value)
        return value

    run = jd.jit(step) if how == "staged" else step
    for k in range(5):
        with jd.context() as ctx:
            run(*refs, X + k)
    clip = optax.identity() if norm is None else optax.clip_by_global_norm(norm)
    assert_close(values(refs), trained_serially(optax.chain(clip, tx), 5))


@on_worker0
def test_the_step_goes_with_the_last_pullback(big_world):
    params = jd.remote(last(), make_params, args=(1,))
    optimizer = jd.DistributedOptimizer(optax.sgd(0.1), [params])

    @jd.jit
    def train(params, x):
        gradient = jd.grad(lambda p: jd.rpc_sync(last(), squares, args=(p, x)))(params)
        optimizer.step(gradient)

    train.plan(params, X)
    sent = sent_to(last(), lambda: train(params, X))
    assert_close(params.to_here(), stepped(make_params(1), X))
    if last():
        assert len(sent) == 1, sent


@pytest.mark.parametrize("how", ["optax", "max_global_norm"])
@on_worker0
def test_a_norm_goes_with_the_last_pullbacks(big_world, how):
    """So clipping by the norm over all owners takes one message to each owner beside those of the gradient."""
    clip, adam = optax.clip_by_global_norm(0.5), optax.adam(1e-2)
    refs = [jd.remote(owner, make_params, args=(owner,)) for owner in (1, 2)]
    if how == "optax":
        optimizer = jd.DistributedOptimizer(optax.chain(clip, adam), refs)
    else:
        optimizer = jd.DistributedOptimizer(adam, refs, max_global_norm=0.5)

    def loss(first, second, x, y):
        out = jd.on(1, affine)(first, x) + jd.on(2, affine)(second, x)
        return ((out - y) ** 2).sum()

    step = jd.jit(training_step(optimizer, loss))
    step.plan(*refs, X)
    for k, owner in enumerate((1, 2)):
        sent = sent_to(owner, lambda: step(*refs, X + k))  # noqa: B023
        assert len(sent) == 3, sent
    assert_close(values(refs), trained_serially(optax.chain(clip, adam), 2))


@on_worker0
def test_the_step_goes_with_fetches_and_contributions(big_world):
    first, second = (jd.remote(last(), make_params, args=(seed,)) for seed in (1, 2))
    [one.creation().result() for one in (first, second)]
    optimizer = jd.DistributedOptimizer(optax.sgd(0.1), [first, second])

    @jd.jit
    def train(a, b):
        loss, gradients = jd.value_and_grad(lambda a, b: (a.to_here()["b"] + b.to_here()["b"]).sum(), (0, 1))(a, b)
        optimizer.step(gradients)
        return loss

    train.plan(first, second)
    before, losses = values((first, second)), []
    sent = sent_to(last(), lambda: losses.append(train(first, second)))
    assert_close(losses[0], sum(one["b"].sum() for one in before))  # fetched before the step
    assert_close(first.to_here()["b"], before[0]["b"] - 0.1)
    assert_close(first.to_here()["w"], before[0]["w"])
    if last():
        assert len(sent) == 1, sent


def stepped(params, x):
    return jax.tree.map(lambda p, g: p - 0.1 * g, params, jax.grad(squares)(params, x))


@on_worker0
def test_the_order_of_the_program(world):
    """Calls before a step see the values before it, also if nothing else needs them; calls after it, those after."""
    params = jd.remote(last(), make_params, args=(1,))
    optimizer = jd.DistributedOptimizer(optax.sgd(0.1), [params])

    @jd.jit
    def train(params, x):
        seen = []
        for _ in range(3):
            seen.append(jd.rpc_sync(last(), affine, args=(params, x)))
            optimizer.step(jd.grad(lambda p: jd.rpc_sync(last(), squares, args=(p, x)))(params))
            seen.append(params.to_here()["b"])
        return seen

    expected, value = [], make_params(1)
    for _ in range(3):
        expected.append(affine(value, X))
        value = stepped(value, X)
        expected.append(value["b"])
    assert_close(train(params, X), expected)
    assert_close(params.to_here(), value)


@on_worker0
def test_gradients_of_two_passes_are_added(big_world):
    params = jd.remote(last(), make_params, args=(1,))
    optimizer = jd.DistributedOptimizer(optax.sgd(0.1), [params])

    def gradient(params, x):
        return jd.grad(lambda p: jd.rpc_sync(last(), affine, args=(p, x)).sum())(params)

    @jd.jit
    def train(params, x):
        gradients = gradient(params, x), gradient(params, 2 * x)
        optimizer.step(jax.tree.map(operator.add, *gradients))

    train(params, X)
    serial = jax.grad(lambda p: (affine(p, X) + affine(p, 2 * X)).sum())(make_params(1))
    expected = jax.tree.map(lambda p, g: p - 0.1 * g, make_params(1), serial)
    assert_close(params.to_here(), expected)
    with jd.context():
        kept = gradient(params, X)
        optimizer.step([kept, gradient(params, 2 * X)])
        first = jax.grad(lambda p: affine(p, X).sum())(make_params(1))
        assert_close(kept.to_here(), first)  # a step leaves the gradients in the context
    assert_close(params.to_here(), jax.tree.map(lambda p, g: p - 0.1 * g, expected, serial))


@pytest.mark.parametrize("staged", [False, True], ids=["from Python", "staged"])
@on_worker0
def test_each_step_takes_the_contributions_of_its_pass(big_world, staged):
    """Passes in one context, whose gradients are used in another order; each is used twice."""
    params = jd.remote(last(), make_params, args=(1,))
    optimizers = [jd.DistributedOptimizer(optax.sgd(rate), [params]) for rate in (0.1, 0.2)]

    def train(params, x):
        def gradient(x):
            return jd.grad(lambda p: sum(jd.rpc_sync(last(), affine, args=(p, x * k)).sum() for k in (1, 2)))(params)

        passes = [gradient(x * scale) for scale in (1, 10, 100, 1000)]
        found = []
        for number in (2, 0, 3, 1):
            for optimizer in optimizers:
                optimizer.step(passes[number])
            found.append(params.to_here())
        return found

    with jd.context():
        found = (jd.jit(train) if staged else train)(params, X)
    value = make_params(1)
    for scale, step in zip((100, 1, 1000, 10), found, strict=True):
        serial = jax.grad(lambda p, s=scale: sum(affine(p, X * s * k).sum() for k in (1, 2)))(value)
        value = jax.tree.map(lambda p, g: p - 0.3 * g, value, serial)
        assert_close(step, value)


@on_worker0
def test_averages_in_the_context_count(big_world):
    """What has replaced the gradient in the context, on its owner, is what the step takes."""
    params = jd.RRef(make_params(1))
    optimizer = jd.DistributedOptimizer(optax.sgd(0.1), [params])
    with jd.context() as ctx:
        gradient = jd.grad(lambda p: jd.rpc_sync(last(), affine, args=(p, X)).sum())(params)
        everybody = jd.DataParallel(one_rank() if launcher_env.launched() else jd.collectives.Local([0]))
        everybody.average_in(ctx, [params])
        optimizer.step(gradient)
        optimizer.step(jd.grad(lambda p: jd.rpc_sync(last(), affine, args=(p, 2 * X)).sum())(params))
    expected = make_params(1)
    for scale in (1, 2):
        serial = jax.grad(lambda p, s=scale: affine(p, s * X).sum())(make_params(1))
        expected = jax.tree.map(lambda p, g: p - 0.1 * g, expected, serial)
    assert_close(params.to_here(), expected)


def one_rank():
    from mpi4py import MPI

    return jd.collectives.MPI(MPI.COMM_SELF)


@on_worker0
def test_gradients_that_were_changed_are_refused(big_world):
    params = jd.remote(last(), make_params, args=(1,))
    optimizer = jd.DistributedOptimizer(optax.sgd(0.1), [params])

    def step(change):
        def train(params):
            gradient = jd.grad(lambda p: jd.rpc_sync(last(), affine, args=(p, X)).sum())(params)
            optimizer.step(change(gradient))

        return train

    def scaled(gradient):
        return jax.tree.map(lambda mark: mark / 2, gradient)

    def negative(gradient):
        return jax.tree.map(operator.neg, gradient)

    def doubled(gradient):
        return jax.tree.map(operator.add, gradient, gradient)

    for change in (scaled, negative, doubled):
        for train in (step(change), jd.jit(step(change))):
            with jd.context(), pytest.raises(TypeError):
                train(params)
    with pytest.raises(jd.ContextError):
        step(lambda gradient: jax.tree.map(lambda leaf: leaf, gradient))(params)
    assert_close(params.to_here(), make_params(1))
    step(lambda gradient: [gradient, gradient])(params)  # one gradient, given twice
    serial = jax.grad(lambda p: affine(p, X).sum())(make_params(1))
    assert_close(params.to_here(), jax.tree.map(lambda p, g: p - 0.1 * g, make_params(1), serial))


@on_worker0
def test_a_gradient_as_an_argument(big_world):
    params = jd.remote(last(), make_params, args=(1,))
    optimizer = jd.DistributedOptimizer(optax.sgd(0.1), [params])
    apply = jd.jit(lambda gradient: optimizer.step(gradient))
    gradient = jd.grad(lambda p: jd.rpc_sync(last(), affine, args=(p, X)).sum())
    with pytest.raises(jd.ContextError):
        apply(gradient(params))
    with jd.context():
        apply(gradient(params))
    serial = jax.grad(lambda p: affine(p, X).sum())(make_params(1))
    assert_close(params.to_here(), jax.tree.map(lambda p, g: p - 0.1 * g, make_params(1), serial))


@on_worker0
def test_effects_before_a_step_come_before_it(big_world):
    """What a program does before a step, a meeting with others for example, has been done when an owner steps."""
    held, seen = [jd.RRef(make_params(1))], []
    optimizer = jd.DistributedOptimizer(optax.sgd(0.1), held)

    def look(x):  # JAX keeps the callback for ever, so the reference is not in it
        time.sleep(0.05)
        seen.append(held[0].local_value()["b"])
        return x

    @jd.jit
    def train(params, x):
        gradient = jd.grad(lambda p: jd.rpc_sync(0, squares, args=(p, x)))(params)
        y = io_callback(look, x, x)
        optimizer.step(gradient)
        return io_callback(look, y, y)

    train(held[0], X)
    held.clear()
    assert_close(seen, [make_params(1)["b"], stepped(make_params(1), X)["b"]])


@on_worker0
def test_an_optimizer_lives_as_long_as_the_staged_step(big_world):
    params = jd.remote(last(), make_params, args=(1,))
    optimizers = [jd.DistributedOptimizer(optax.sgd(0.1), [params])]
    train = jd.jit(training_step_of_one(optimizers))
    train(params, X)
    optimizers[0] = None
    gc.collect()
    train(params, X)
    assert_close(params.to_here(), stepped(stepped(make_params(1), X), X))


def training_step_of_one(optimizers):
    def train(params, x):
        optimizers[0].step(jd.grad(lambda p: jd.rpc_sync(last(), squares, args=(p, x)))(params))

    return train


@on_worker0
def test_a_reference_that_others_use(big_world):
    """Contributions of a worker that is neither the caller nor the owner have come when the owner steps."""
    params = jd.remote(last(), make_params, args=(1,))
    optimizer = jd.DistributedOptimizer(optax.sgd(0.1), [params])

    @jd.jit
    def train(params, x):
        def loss(params):
            return sum(jd.rpc_sync(rank, squares, args=(params, x)) for rank in range(last() + 1))

        optimizer.step(jd.grad(loss)(params))

    train(params, X)
    gradient = jax.grad(squares)(make_params(1), X)
    assert_close(params.to_here(), jax.tree.map(lambda p, g: p - 0.1 * (last() + 1) * g, make_params(1), gradient))


@on_worker0
def test_a_value_without_a_gradient_is_named(big_world):
    refs = references()
    optimizer = jd.DistributedOptimizer(optax.sgd(0.1), refs)
    before = values(refs)

    def unused(first, second):
        return jd.grad(lambda p, q: jd.rpc_sync(0, affine, args=(p, X)).sum(), argnums=(0, 1))(first, second)

    for way in (lambda a, b: optimizer.step(unused(b, a)), jd.jit(lambda a, b: optimizer.step(unused(a, b)))):
        with pytest.raises(jd.DifferentiationError):
            way(*refs)
    with pytest.raises(jd.DifferentiationError) as caught:
        optimizer.step(jd.grad(lambda p: jd.rpc_sync(0, affine, args=(p, X)).sum())(refs[0]))
    assert caught.value.missing == [str(refs[1])]
    assert_close(values(refs), before)


def product_with_held(value):
    return jnp.sum(value["w"] * value["held"].to_here())


@on_worker0
def test_a_value_that_is_used_as_a_part_of_another_steps_with_the_context(big_world):
    held = jd.remote(1, jnp.ones, args=(3,))
    outer = jd.remote(2, holding, args=(jd.by_reference(held),))
    optimizer = jd.DistributedOptimizer(optax.sgd(0.1), [outer, held])
    with jd.context() as ctx:
        gradients = jd.grad(lambda p, _: jd.rpc_sync(2, product_with_held, args=(p,)), argnums=(0, 1))(outer, held)
        with pytest.raises(jd.DifferentiationError):
            optimizer.step(gradients)
        optimizer.step(ctx)
    assert_close(held.to_here(), 1 - 0.1 * jnp.arange(3.0))
    assert_close(outer.to_here()["w"], jnp.arange(3.0) - 0.1)


@on_worker0
def test_gradients_that_are_not_finite_change_nothing(big_world):
    refs = references()
    optimizer = jd.DistributedOptimizer(optax.sgd(0.1), refs, refuse_nan=True)
    before = values(refs)

    def loss(first, second, x, y):
        there = jd.rpc_sync(last(), affine, args=(first, x)).sum()
        return there + jd.rpc_sync(0, affine, args=(second, x)).sum() * jnp.nan

    for step in (training_step(optimizer, loss), jd.jit(training_step(optimizer, loss))):
        with pytest.raises(jd.DifferentiationError):
            step(*refs, X)
    assert_close(values(refs), before)


@on_worker0
def test_steps_in_wrong_places_are_refused(big_world):
    params = jd.remote(last(), make_params, args=(1,))
    optimizer = jd.DistributedOptimizer(optax.sgd(0.1), [params])

    def gradient(params):
        return jd.grad(lambda p: jd.rpc_sync(last(), affine, args=(p, X)).sum())(params)

    def step(params, x):
        optimizer.step(gradient(params))
        return x

    held = [params]  # JAX keeps the body, and knows its jaxpr the second time

    def body(x, _):
        return step(held[0], x), None

    def in_a_loop(params, x):
        return jax.lax.scan(body, x, length=2)[0]

    def in_a_branch(params, x):
        return jax.lax.cond(x.sum() > 0, lambda: step(params, x), lambda: x)

    one = jd.grad(lambda p, x: jd.rpc_sync(last(), affine, args=(p, x)).sum())
    batch = jnp.ones((2, 3))
    with jd.context() as ctx:
        wrong = [jax.jit(step), jd.jit(in_a_loop), jd.jit(in_a_branch), jax.grad(lambda p, x: step(p, x).sum())]
        for function in [*wrong, jd.jit(lambda params, x: in_a_loop(params, x))]:
            with pytest.raises(jd.DifferentiationError):
                function(params, X)
        with pytest.raises(jd.DifferentiationError):
            jd.jit(lambda p: optimizer.step(ctx))(params)
        with pytest.raises(TypeError):
            optimizer.step((gradient(params), X))
        with pytest.raises(TypeError):
            jd.jit(lambda p: optimizer.step(jax.vmap(one, (None, 0))(p, batch)))(params)
        kept = gradient(params)
    with jd.context(), pytest.raises(jd.ContextError):
        optimizer.step([kept, gradient(params)])
    with pytest.raises(jd.ContextError):
        optimizer.step(kept)
    held.clear()
    assert_close(params.to_here(), make_params(1))
