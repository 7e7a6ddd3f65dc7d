"""``jd.get`` and ``jd.tree_map``: values of trees of references, and computing with them where they are."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers.data import assert_close
from helpers.programs import X, parameters
from helpers.worlds import last, on_worker0, rank

import jdistgrad as jd
from jdistgrad import events


def moving_average(average, new):
    return 0.9 * average + 0.1 * new


def sum_of_squares(x):
    return jnp.sum(x**2)


@jax.jit
def layer(p, x):
    return jnp.tanh(x @ p["w"] + p["b"])


def applied(p, x):
    return jnp.sum(layer(p, x))


def on_all_workers():
    """Return a tree with a reference to parameters of its own shapes on each worker, and what they are."""
    sizes = [(k + 2, k + 1) for k in range(jd.world_size())]
    return (
        {f"layer{k}": jd.remote(k, parameters, args=(*size, k)) for k, size in enumerate(sizes)},
        {f"layer{k}": parameters(*size, k) for k, size in enumerate(sizes)},
    )


@on_worker0
def test_values_of_a_tree(big_world):
    references, values = on_all_workers()
    module = jd.RemoteFunction(last(), parameters, layer, args=(3, 2))
    tree = {"all": references, "x": X, "n": 3, "module": [module], "none": None, "name": "a"}
    found = jd.get(tree)
    assert_close(found["all"], values)
    assert_close(found["module"], [{"parameters": parameters(3, 2)}])
    assert (found["n"], found["none"], found["name"]) == (3, None, "a")
    assert found["x"] is X
    assert_close(jd.get(references["layer1"]), values["layer1"])


@pytest.mark.parametrize("fetch", [jd.get, jd.RRef.to_here], ids=["get", "to_here"])
@on_worker0
def test_what_is_fetched_is_a_copy(big_world, fetch):
    for owner in range(jd.world_size()):
        reference = jd.put(owner, {"w": np.arange(3.0), "of": [1]})
        if owner or fetch is jd.get:  # on its owner, to_here returns the value itself
            found = fetch(reference)
            found["w"] = found["w"] + 1
            found["of"].append(2)
            assert_close(jd.get(reference), {"w": np.arange(3.0), "of": [1]})


@on_worker0
def test_gradients_of_a_tree(big_world):
    references, values = on_all_workers()

    def loss(tree, call):
        return sum(call(k, tree[f"layer{k}"], jnp.arange(k + 2.0)) for k in range(3))

    with jd.context():
        _, gradients = jd.value_and_grad(loss)(references, lambda to, *args: jd.rpc_sync(rank(to), applied, args=args))
        found = jd.get({"value": references["layer2"], "gradient": gradients})
        expected = jax.grad(loss)(values, lambda to, *args: applied(*args))
        assert_close(found, {"value": values["layer2"], "gradient": expected})
    with pytest.raises(jd.ContextError):
        jd.get(gradients)


@on_worker0
def test_a_map_over_several_owners(big_world):
    references, values = on_all_workers()
    others = {name: jd.remote(rank(k + 1), jax.tree.map, args=(jnp.ones_like, value)) for k, (name, value) in
              enumerate(values.items())}  # fmt: skip
    averages = jd.tree_map(moving_average, references, others)
    assert [one.owner for one in averages.values()] == [one.owner for one in references.values()]
    expected = jax.tree.map(lambda a: moving_average(a, 1.0), values)
    assert_close(jd.get(averages), expected)
    # Values of this worker and arrays take part; leaves of the first tree that are here are mapped here.
    mixed = jd.tree_map(moving_average, {**references, "here": X}, {**values, "here": jd.remote(last(), jnp.sin, (X,))})
    assert isinstance(mixed["here"], jax.Array)
    assert_close(jd.get(mixed), {**values, "here": moving_average(X, jnp.sin(X))})
    assert_close(jd.get(references), values)


@on_worker0
def test_a_module_has_a_target_network(big_world):
    module = jd.RemoteFunction(rank(1), parameters, layer, args=(3, 2))
    target = jd.tree_map(jnp.copy, module)
    optimizer = jd.DistributedOptimizer(optax.sgd(0.5), [module.parameters])
    before = parameters(3, 2)
    with jd.context() as ctx:
        jd.grad(lambda module: jnp.sum(module(X)))(module)
        optimizer.step(ctx)
    assert_close(target(X), layer(before, X))
    after = jax.tree.map(lambda p, g: p - 0.5 * g, before, jax.grad(lambda p: jnp.sum(layer(p, X)))(before))
    assert_close(module(X), layer(after, X))
    target = jd.tree_map(moving_average, target, module)
    assert_close(target(X), layer(jax.tree.map(moving_average, before, after), X))


def descended(p, g):
    return p - 0.5 * g


@on_worker0
def test_a_map_over_values_and_gradients(big_world):
    references, values = on_all_workers()
    loss = lambda tree, call: call(1, tree["layer2"], jnp.arange(4.0))  # noqa: E731
    with jd.context():
        gradients = jd.grad(loss)(references, lambda to, *args: jd.rpc_sync(rank(to), applied, args=args))
        found = jd.get(jd.tree_map(descended, references, gradients))
    expected = jax.grad(loss)(values, lambda to, *args: applied(*args))
    assert_close(found, jax.tree.map(descended, values, expected))


@pytest.mark.parametrize("stage", [jax.jit, jd.jit], ids=["jax.jit", "jd.jit"])
@on_worker0
def test_weight_decay_over_owners(big_world, stage):
    references, values = on_all_workers()

    def loss(tree, call, decay):
        return call(2, tree["layer1"], jnp.arange(3.0)) + 0.1 * decay(tree)

    def decay(tree):
        return sum(jax.tree.leaves(jd.get(jd.tree_map(sum_of_squares, tree))))

    def remotely(tree):
        return loss(tree, lambda to, *args: jd.rpc_sync(rank(to), applied, args=args), decay)

    def serially(tree):
        return loss(
            tree, lambda to, *args: applied(*args), lambda tree: sum(map(sum_of_squares, jax.tree.leaves(tree)))
        )

    with jd.context():
        value, gradients = stage(jd.value_and_grad(remotely))(references)
        assert_close((value, jd.get(gradients)), jax.value_and_grad(serially)(values), rtol=1e-5)


@on_worker0
def test_each_owner_is_asked_once(big_world):
    references, values = on_all_workers()
    twice = [references, {"again": references}, np.ones(2)]
    calls = []
    events.sink = calls.append
    try:
        found = jd.get(twice)
    finally:
        events.sink = None
    assert_close(found, [values, {"again": values}, np.ones(2)])
    sent = [one for one in map(events.made, calls) if one.kind == events.CALL and "on_owners" in one.name]
    assert len(sent) == jd.world_size()


@on_worker0
def test_what_is_wrong_with_a_map_is_said(big_world):
    references, _ = on_all_workers()
    with pytest.raises(ValueError):
        jd.tree_map(moving_average, references, {"layer0": X})
    shapes = jd.tree_map(moving_average, references["layer1"], references["layer2"])
    with pytest.raises((TypeError, ValueError)):
        jd.get(shapes)
    with pytest.raises(TypeError):
        jd.tree_map(3, references)
    with pytest.raises(ValueError):
        jd.tree_map(jnp.copy, [references["layer1"]] * 2, in_place=True)


@pytest.mark.parametrize("worker", [0, 2])
@on_worker0
def test_a_gradient_by_jax_grad_is_never_taken_for_the_value(big_world, worker):
    p = jd.put(worker, jnp.arange(3.0))
    with jd.context():
        gradient = jax.grad(lambda p: jd.on(worker, sum_of_squares)(p))(p)
        tx = jd.on_owners(optax.sgd(0.1))
        state = tx.init(p)
        for use in (
            jd.get,
            jd.on(1, sum_of_squares),
            lambda g: jd.on(1, sum_of_squares).keep(g).to_here(),
            lambda g: jd.get(jd.tree_map(jnp.add, p, g)),
            lambda g: jd.get(tx.update(g, state, p)),
        ):
            with pytest.raises(jd.DifferentiationError, match=r"came out of jax\.grad as a gradient"):
                use(gradient)


@on_worker0
def test_a_map_in_place_changes_the_values_of_the_same_references(big_world):
    params = {"far": jd.put(2, {"w": jnp.arange(3.0)}), "near": jd.put(0, jnp.ones(2)), "here": jnp.ones(4)}
    found = jd.tree_map(
        jnp.add, params, {"far": jd.put(1, {"w": jnp.ones(3)}), "near": 2.0, "here": 3.0}, in_place=True
    )
    assert found["far"] is params["far"]
    assert found["near"] is params["near"]
    assert_close(jd.get(params["far"]), {"w": jnp.arange(3.0) + 1})
    assert_close(jd.get(found), {"far": {"w": jnp.arange(3.0) + 1}, "near": jnp.full(2, 3.0), "here": jnp.full(4, 4.0)})
    several = [jd.on(worker, add_in_place).start(jd.by_reference(params["far"]), 5) for worker in range(3)]
    assert [one.result() for one in several] == [None] * 3
    assert_close(jd.get(params["far"]), {"w": jnp.arange(3.0) + 16})
    with pytest.raises(jd.DifferentiationError):
        jax.jit(lambda x: jd.tree_map(jnp.add, params["near"], x, in_place=True))(jnp.ones(2))


def add_in_place(reference, times):
    for _ in range(times):
        jd.tree_map(lambda leaf: leaf + 1, reference, in_place=True)
