"""Gradients of the values of references: they stay with the owners, and pass from one owner to the next."""

import dataclasses

import jax
import jax.numpy as jnp
import pytest
from helpers.data import assert_close, sum_squares
from helpers.programs import fast_layer, holding, layer, parameters, product, serial, still_differentiates, sync, vector
from helpers.worlds import on_worker0, rank

import jdistgrad as jd


@on_worker0
def test_gradients_of_references_stay_with_their_owners(big_world):
    # The owner of the parameters is the caller, the callee or a third worker.
    x = vector((2, 3))
    for owner in range(jd.world_size()):
        rref = jd.remote(owner, parameters, args=(3, 2))
        serially = jax.value_and_grad(lambda p: sum_squares(layer(p, x)))(rref.to_here())
        for callee in range(jd.world_size()):
            function = (layer, fast_layer)[(owner + callee) % 2]
            loss = lambda p: sum_squares(jd.rpc_sync(callee, function, args=(p, x)))  # noqa: B023, E731
            value, gradient = jd.value_and_grad(loss)(rref)
            assert gradient.owner.rank == owner
            assert_close((value, gradient.to_here()), serially)
            del gradient


@on_worker0
def test_a_reference_used_here_and_there(big_world):
    # The reference is fetched, passed to two workers, and used in a call with an unused result.

    def program(call, p, x):
        call(0, layer, p, x)
        return sum_squares(call(1, fast_layer, p, x)) * sum_squares(call(2, layer, p, x * 2))

    x = vector((2, 3))
    rref = jd.remote(rank(1), parameters, args=(3, 2))
    loss = lambda p, x: program(sync, p, x) + rref_sum(p)  # noqa: E731
    value, (of_p, of_x) = jd.value_and_grad(loss, argnums=(0, 1))(rref, x)
    expected = jax.value_and_grad(lambda p, x: program(serial, p, x) + sum_squares(p), argnums=(0, 1))
    assert_close((value, (of_p.to_here(), of_x)), expected(rref.to_here(), x))


@pytest.mark.parametrize("wrap", [lambda f: f, jd.jit], ids=["eager", "jd.jit"])
@on_worker0
def test_a_call_that_is_the_same_in_each_iteration_contributes_in_each(big_world, wrap):
    """XLA would move the call, and its pullback, out of the loop."""

    def loss(call):
        return lambda p: jax.lax.scan(lambda c, _: (c + jnp.sum(call(2, product, p, 2.0)), None), 0.0, None, length=4)[
            0
        ]

    reference = jd.remote(rank(1), vector, args=(3,))
    with jd.context() as ctx:
        gradient = wrap(jd.grad(loss(sync)))(reference)
        expected = jax.grad(loss(serial))(vector(3))
        assert_close(gradient.to_here(), expected)
        assert_close(jd.on(rank(1), gradients_here)(ctx.id), expected)


def squares_times(a, b):
    return a**2 * b


@on_worker0
def test_a_reference_that_is_passed_twice_gets_two_contributions(big_world):
    def squared(call, x):
        made = jd.remote(rank(1), product, args=(x, 2.0)) if call is sync else product(x, 2.0)
        return jnp.sum(call(2, product, made, made) * x)

    x = vector(3)
    assert_close(jd.grad(lambda x: squared(sync, x))(x), jax.grad(lambda x: squared(serial, x))(x))
    rref = jd.RRef(x)
    gradient = jd.grad(lambda p: jnp.sum(sync(1, product, p, p)))(rref)
    assert gradient.marks[0] == 2
    assert_close(gradient.to_here(), jax.grad(lambda p: jnp.sum(product(p, p)))(x))


def of_both(call):
    def loss(a, b):
        return jnp.sum(call(1, product, a, 2.0) + call(2, squares_times, a, b) + call(1, product, b, 3.0))

    return loss


@pytest.mark.parametrize("wrap", [lambda f: f, jd.jit], ids=["eager", "jd.jit"])
@on_worker0
def test_one_reference_at_two_places_has_a_gradient_for_each(big_world, wrap):
    reference = jd.remote(rank(1), vector, args=(3,))
    found = wrap(jd.grad(of_both(sync), argnums=(0, 1)))(reference, reference)
    assert_close(jd.get(found), jax.grad(of_both(serial), argnums=(0, 1))(vector(3), vector(3)))


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Layer:
    """A layer with leaves that are not arrays, as in the models of other libraries."""

    weight: jax.Array
    activation: object
    seen: jax.Array
    key: jax.Array
    width: int
    slope: float


def make_layer(n):
    weight = jnp.arange(3.0 * n).reshape(n, 3) / 10
    return Layer(weight, lambda x: jnp.tanh(x) * x, jnp.arange(n), jax.random.key(1), n, 0.25)


def apply_layer(layer, x):
    return layer.activation(layer.weight @ x) * layer.slope


def gradients_here(context):
    (found,) = jd.get_gradients(context).values()
    return found


@on_worker0
def test_the_gradient_of_a_value_with_leaves_that_have_none(big_world):
    # The gradient has None for such leaves: no object that cannot be sent, and no number that is not a gradient.
    x, value = vector(3), jd.remote(rank(1), make_layer, args=(4,))
    with jd.context() as ctx:
        gradient = jd.grad(lambda value: sum_squares(jd.rpc_sync(rank(1), apply_layer, args=(value, x))))(value)
        found = gradient.to_here(), jd.rpc_sync(rank(1), gradients_here, args=(ctx.id,))
    near = make_layer(4)
    with_weight = lambda w: dataclasses.replace(near, weight=w)  # noqa: E731
    weight = jax.grad(lambda w: sum_squares(apply_layer(with_weight(w), x)))(near.weight)
    for one in found:
        assert_close(one, Layer(weight, None, None, None, None, None))


def rref_sum(rref):
    return sum_squares(rref.to_here())


@on_worker0
def test_references_in_a_pytree_of_arguments(big_world):
    refs = {"a": [jd.remote(rank(k), parameters, args=(3, k + 1)) for k in range(3)]}
    x = vector((2, 3))

    def loss(call):
        return lambda refs: sum(sum_squares(call(k + 1, layer, p, x)) for k, p in enumerate(refs["a"]))

    value, gradients = jd.value_and_grad(loss(sync))(refs)
    values = {"a": [rref.to_here() for rref in refs["a"]]}
    assert_close((value, {"a": [one.to_here() for one in gradients["a"]]}), jax.value_and_grad(loss(serial))(values))


def own_and_fetch(x):
    rref = jd.RRef({"x": x * 2, "n": 3})
    return jd.rpc_sync(rank(1), doubled, args=(rref,)) * rref.local_value()["x"]


def doubled(tree):
    return tree["x"] * tree["n"]


@on_worker0
def test_a_traced_value_given_to_a_reference(big_world):
    with jd.context():
        found = jax.jacrev(own_and_fetch)(vector(3))
        second = jax.jacrev(jax.jacrev(own_and_fetch))(vector(3))
    serially = lambda x: 6 * x * 2 * x  # noqa: E731
    assert_close(found, jax.jacrev(serially)(vector(3)))
    assert_close(second, jax.jacrev(jax.jacrev(serially))(vector(3)))


@on_worker0
def test_a_chain_of_references(big_world):
    # Each value is made from the reference before it: gradients pass from owner to owner.

    def loss(remote, x):
        value = x
        for k in range(5):
            value = remote(k, value, x)
        return value

    def remotely(k, value, x):
        return jd.remote(rank(k), product, args=(value, x))

    with jd.context():
        found = jax.jacrev(lambda x: loss(remotely, x).to_here())(vector(3))
        second = jax.grad(lambda x: jnp.sum(jax.grad(lambda x: loss(remotely, x).to_here()[1])(x)))(vector(3))
    serially = lambda x: loss(lambda k, value, x: product(value, x), x)  # noqa: E731
    assert_close(found, jax.jacrev(serially)(vector(3)))
    assert_close(second, jax.grad(lambda x: jnp.sum(jax.grad(lambda x: serially(x)[1])(x)))(vector(3)))


@on_worker0
def test_gradients_of_a_context_inside_an_outer_derivative_are_refused(world):
    # The owner is the caller. They would be constants there, and the derivative zero.
    rref = jd.remote(0, vector, args=(3,))
    with jd.context() as ctx:

        def outer(x):
            jd.grad(lambda p: jd.rpc_sync(rank(1), product, args=(p, x)).sum())(rref)
            return sum(jnp.sum(one) for one in jd.get_gradients(ctx).values())

        for trace in (jax.grad(outer), jax.jit(outer)):
            with pytest.raises(jd.DifferentiationError):
                trace(vector(3))


@pytest.mark.parametrize("jacobian", [jax.jacrev, lambda f: jax.jit(jax.jacrev(f))], ids=["eager", "jit"])
@on_worker0
def test_a_jacobian_of_a_gradient_of_a_reference_is_refused(world, jacobian):
    rref = jd.remote(rank(2), vector, args=(3,))
    gradient = jd.grad(lambda p: jnp.sum(p.to_here() ** 2))
    with jd.context(), pytest.raises(Exception, match=r"jacrev requires real-valued outputs"):
        jacobian(gradient)(rref)
    with jd.context():
        assert_close(gradient(rref).to_here(), 2 * vector(3))


@pytest.mark.parametrize(
    "transform",
    [
        jax.jit,
        jd.jit,
        jax.checkpoint,
        jax.grad,
        lambda f: lambda x: jax.vmap(f)(jnp.stack([x, 2 * x])),
    ],
    ids=["jax.jit", "jd.jit", "checkpoint", "grad", "vmap"],
)
@on_worker0
def test_a_gradient_is_not_fetched_where_jax_traces_it(world, transform):
    # Fetched there it would be zero, or the sum over the batch, or have a derivative of zero: nobody would be told.
    rref = jd.remote(rank(2), vector, args=(3,))

    def squared_norm(x):
        gradient = jd.grad(lambda p: jnp.sum(jd.rpc_sync(rank(1), product, args=(p, x))))(rref)
        return jnp.sum(gradient.to_here() ** 2)

    with jd.context():
        with pytest.raises(jd.DifferentiationError, match=r"function that JAX traces.*fetch it outside"):
            transform(squared_norm)(vector(3))
        still_differentiates()


def sine_times(a, b):
    return jnp.sin(a) * b


def twice_of(a):
    return 2 * a


@pytest.mark.parametrize("wrap", [lambda f: f, jax.jit, jd.jit], ids=["eager", "jax.jit", "jd.jit"])
@on_worker0
def test_an_array_before_a_reference_among_the_arguments(big_world, wrap):
    # In compiled code arguments may be NumPy arrays, which must not be compared with references.

    def far(x):
        return sync(2, sine_times, x, jd.remote(1, twice_of, args=(x,))).sum()

    x = jnp.arange(3.0)
    with jd.context():
        found = wrap(jax.grad(far))(x)
    assert_close(found, jax.grad(lambda x: sine_times(x, twice_of(x)).sum())(x))


@jax.jit
def compiled_relay(reference, x):
    return jd.rpc_sync(rank(2), sine_times, args=(x, reference))


@on_worker0
def test_a_second_derivative_through_a_reference_in_the_callees_compiled_code(big_world):
    # The callee's program asks for the shapes of a pullback whose reference is known there by the shape of its handle.

    def relayed(x):
        reference = jd.remote(rank(2), twice_of, args=(x,))
        return jd.rpc_sync(rank(1), compiled_relay, args=(jd.by_reference(reference), x)).sum()

    x = jnp.arange(3.0) / 3
    second = lambda f: jax.grad(lambda x: (jax.grad(f)(x) ** 2).sum())  # noqa: E731
    with jd.context():
        found = second(relayed)(x)
    assert_close(found, second(lambda x: sine_times(x, twice_of(x)).sum())(x))


@jax.jit
def squares_of_own(value, x):
    return jnp.sum(value["w"] ** 2 * x)


@jax.jit
def squares_of_all(value, x):
    return jnp.sum((value["w"] * value["held"].to_here()) ** 2 * x)


@pytest.mark.parametrize("staged", [False, True])
@on_worker0
def test_a_compiled_function_of_a_value_that_holds_a_reference(big_world, staged):
    held = jd.remote(rank(2), vector, args=(3,))
    outer, x, w, of_held = (
        jd.remote(rank(1), holding, args=(jd.by_reference(held),)),
        vector(3),
        jnp.arange(3.0),
        vector(3),
    )
    for function, factor in ((squares_of_own, 1.0), (squares_of_all, of_held)):
        loss = lambda p, x: jd.rpc_sync(rank(1), function, args=(p, x))  # noqa: B023, E731
        both = jd.value_and_grad(loss, argnums=(0, 1))
        with jd.context():
            value, (of_outer, of_x) = (jd.jit(both) if staged else both)(outer, x)
            expected = jax.value_and_grad(lambda w, x: jnp.sum((w * factor) ** 2 * x), argnums=(0, 1))(w, x)  # noqa: B023
            assert_close((value, (of_outer.to_here()["w"], of_x)), expected)
