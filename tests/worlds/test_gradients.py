"""Derivatives of remote calls against the serial program: random asymmetric pytrees and cotangents, every transform."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import sparse
from oracles import WAYS, fetched, handed_on, rank, same, same_gradients, serial, sum_squares, sync

import jdistgrad as jd
from jdistgrad.rpc.current import current_worker


def layer(params, x, *, scale=1.0):
    h = jnp.tanh(x @ params["w"] + params["b"])
    return {"h": h * scale, "pair": (jnp.sum(h**2), h[0] * 3)}


fast_layer = jax.jit(layer)


def parameters(n, m, seed=0):
    chance = np.random.default_rng(seed)
    return {"w": jnp.float32(chance.normal(size=(n, m))), "b": jnp.float32(chance.normal(size=m))}


def vector(n, seed=1):
    return jnp.float32(np.random.default_rng(seed).normal(size=n))


@pytest.mark.parametrize(
    ("way", "function"),
    [(sync, layer), *((way, fast_layer) for way in WAYS)],
    ids=["sync_as_written", *(way.__name__ for way in WAYS)],
)
def test_every_way_to_call_every_worker(big_world, way, function):
    def body():
        for to in range(jd.world_size()):

            def program(call, params, x, to=to):
                return call(to, function, params, x, scale=2.5)

            same_gradients(program, parameters(3, 2, to), vector((4, 3), to), call=way)

    big_world.drive(body)


def two_layers(call, first, second, x):
    out = call(1, fast_layer, first, x)
    return call(2, layer, second, out["h"] * out["pair"][0])


def test_calls_after_one_another(big_world):
    def body():
        same_gradients(two_layers, parameters(3, 4), parameters(4, 2, 5), vector((2, 3)))

    big_world.drive(body)


def nested(x):
    return jd.rpc_sync(rank(2), innermost, args=(jnp.sin(x), x[:2])) * x


def innermost(x, y):
    return x * jnp.sum(y**2)


def nested_serially(x):
    return innermost(jnp.sin(x), x[:2]) * x


def circle(path, x):
    return jd.rpc_sync(path[0], circle, args=(path[1:], jnp.sin(x) * x)) + x if path else x**3


def circle_serially(path, x):
    return circle_serially(path[1:], jnp.sin(x) * x) + x if path else x**3


def test_a_call_that_makes_a_call(big_world):
    def body():
        with jd.context():
            found = jax.jacrev(lambda x: jd.rpc_sync(rank(1), nested, args=(x,)))(vector(3))
        same(found, jax.jacrev(nested_serially)(vector(3)))

    big_world.drive(body)


def test_calls_in_a_circle(world):
    """0 -> 1 -> 2 -> 0 -> 1: the callee waits for whom it serves."""

    def body():
        path = [rank(k) for k in (1, 2, 0, 1)]
        with jd.context():
            found = jax.jacrev(lambda x: circle(path, x))(vector(3))
        same(found, jax.jacrev(lambda x: circle_serially(path, x))(vector(3)))

    world.drive(body)


def through_remote(x):
    rref = jd.remote(rank(2), innermost, args=(x, x[1:]))
    return jd.rpc_sync(rank(0), innermost, args=(rref, x)) * rref.to_here()


def through_remote_serially(x):
    inner = innermost(x, x[1:])
    return innermost(inner, x) * inner


def test_a_callee_that_makes_references_of_its_own(big_world):
    def body():
        with jd.context():
            found = jax.jacrev(lambda x: jd.rpc_sync(rank(1), through_remote, args=(x,)))(vector(3))
        same(found, jax.jacrev(through_remote_serially)(vector(3)))

    big_world.drive(body)


def product(x, y):
    return jnp.sin(x) * y


fast_product = jax.jit(product)


def chain(call, x):
    return jnp.sum(call(2, product, call(1, fast_product, x, x * x), x) ** 2)


def fan(call, x):
    a, b = call(1, product, x, 2.0), call(2, fast_product, x[::-1], x)
    return jnp.sum(a * b) + jnp.sum(call(0, product, a, b))


def scanned(call, x):
    step = lambda carry, one: (call(1, fast_product, carry, one), carry.sum())  # noqa: E731
    last, sums = jax.lax.scan(step, x, jnp.stack([x, x + 1, 2 * x]))
    return jnp.sum(last * sums)


def branching(call, x):
    yes, no = (lambda x: call(1, fast_product, x, x)), (lambda x: call(2, product, x, 2 * x))
    return jnp.sum(jax.lax.cond(x[0] > 0, yes, no, x) * jax.lax.cond(x[0] < 0, yes, no, x))


def checkpointed(call, x):
    return jnp.sum(jax.checkpoint(lambda x: call(1, product, x, call(2, fast_product, x, x)))(x) ** 2)


def compiled(call, x):
    return jax.jit(lambda x: chain(call, x))(x) * 2


def diamond(call, x):
    shared = call(1, product, x, x)
    return jnp.sum(call(2, product, shared, x) * call(0, fast_product, shared, shared))


def second(f):
    return jax.grad(lambda x: jnp.sum(jax.grad(f)(x) * jnp.cos(x)))


def third(f):
    return jax.grad(lambda x: jnp.sum(second(f)(x) * x))


def hessian(f):
    return jax.jacrev(jax.jacrev(f))


PROGRAMS = [chain, fan, scanned, branching, checkpointed, compiled, diamond]


@pytest.mark.parametrize(
    ("program", "derivative"),
    [*((program, hessian) for program in PROGRAMS), (chain, third), (scanned, third), (diamond, third)],
)
def test_derivatives_of_every_order(big_world, program, derivative):
    def body():
        x = vector(3)
        with jd.context():
            found = derivative(lambda x: program(sync, x))(x)
        same(found, derivative(lambda x: program(serial, x))(x), rtol=1e-4, atol=1e-4)

    big_world.drive(body)


@pytest.mark.parametrize("way", [fetched, handed_on])
@pytest.mark.parametrize(("program", "derivative"), [(chain, third), (diamond, second)])
def test_derivatives_of_every_order_through_references(big_world, program, derivative, way):
    def body():
        x = vector(3)
        with jd.context():
            found = derivative(lambda x: program(way, x))(x)
        same(found, derivative(lambda x: program(serial, x))(x), rtol=1e-4, atol=1e-4)

    big_world.drive(body)


TRANSFORMED = {
    "grad": jax.grad,
    "value_and_grad": jax.value_and_grad,
    "own grad": jd.grad,
    "own value_and_grad": jd.value_and_grad,
    "grad of jit": lambda f: jax.grad(jax.jit(f)),
    "jit of grad": lambda f: jax.jit(jax.grad(f)),
    "jit of hessian": lambda f: jax.jit(jax.jacrev(jax.grad(f))),
    "jit of value": jax.jit,
    "grad of checkpoint": lambda f: jax.grad(jax.checkpoint(f)),
    "jit of grad of checkpoint": lambda f: jax.jit(jax.grad(jax.checkpoint(f))),
    "vmap": lambda f: lambda x: jax.vmap(f)(rows(x)),
    "vmap of grad": lambda f: lambda x: jax.vmap(jax.grad(f))(rows(x)),
    "vmap of second": lambda f: lambda x: jax.vmap(second(f))(rows(x)),
    "grad of vmap": lambda f: jax.grad(lambda x: jnp.sum(jax.vmap(f)(rows(x)) ** 2)),
    "second of vmap": lambda f: second(lambda x: jnp.sum(jax.vmap(f)(rows(x)) ** 2)),
    "vmap of vmap of grad": lambda f: lambda x: jax.vmap(jax.vmap(jax.grad(f)))(rows(x).reshape(2, 2, 3)),
    "jit of vmap of grad": lambda f: lambda x: jax.jit(jax.vmap(jax.grad(f)))(rows(x)),
    "grad of scan": lambda f: jax.grad(lambda x: repeated(f, x)),
    "jit of grad of scan": lambda f: jax.jit(jax.grad(lambda x: repeated(f, x))),
}


def rows(x):
    return jnp.stack([x, x * 2, x - 1, x[::-1]])


def repeated(f, x):
    return jax.lax.scan(lambda total, one: (total * 0.5 + f(one) * f(x), None), 0.0, rows(x))[0]


@pytest.mark.parametrize("name", TRANSFORMED)
def test_every_transformation(big_world, name):
    def body():
        x, transform = vector(3) / 2, TRANSFORMED[name]
        with jd.context():
            found = transform(lambda x: chain(sync, x))(x)
        same(found, transform(lambda x: chain(serial, x))(x), rtol=1e-4, atol=1e-4)

    big_world.drive(body)


def test_the_same_derivatives_in_every_world(world):
    def body():
        for name in ("jit of grad", "vmap of grad"):
            x, transform = vector(3), TRANSFORMED[name]
            with jd.context():
                found = transform(lambda x: fan(sync, x))(x)
            same(found, transform(lambda x: fan(serial, x))(x), rtol=1e-4, atol=1e-4)

    world.drive(body)


def test_a_compiled_step_runs_again_in_the_next_context(big_world):
    def body():
        step = jax.jit(jax.value_and_grad(lambda x: chain(sync, x)))
        for k in range(4):
            x = vector(3, seed=k)
            with jd.context():
                found = step(x)
            same(found, jax.value_and_grad(lambda x: chain(serial, x))(x))

    big_world.drive(body)


def test_a_batched_cotangent_on_one_recorded_call(big_world):
    """jacrev maps a pullback that was recorded once."""

    def body():
        with jd.context():
            found = jax.jacrev(lambda x: jd.rpc_sync(rank(1), product, args=(x, x)))(vector(4))
            grid = jax.jacrev(lambda x: jd.rpc_sync(rank(1), fast_product, args=(x, x.T)))(vector((2, 2)))
        same(found, jax.jacrev(lambda x: product(x, x))(vector(4)))
        same(grid, jax.jacrev(lambda x: product(x, x.T))(vector((2, 2))))

    big_world.drive(body)


def mixed(count, flags, x, z, half, *, label):
    kept = jnp.where(flags, x, 0.0) * count
    return {"real": kept, "complex": z * kept.sum(), "half": half * half, "count": count + 1, label: jnp.flip(flags)}


def test_arguments_of_every_dtype(big_world):
    def body():
        args = (
            jnp.int32(3),
            jnp.array([True, False, True]),
            vector(3),
            jnp.complex64(vector(2) + 1j * vector(2, 5)),
            jnp.bfloat16(vector(4, 6)),
        )
        same_gradients(lambda call, *args: call(1, mixed, *args, label="flags"), *args)

    big_world.drive(body)


def halves(x, y):
    return (x * y).astype(jnp.bfloat16), (x + y).astype(jnp.float16)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16, jnp.float32, jnp.complex64])
def test_each_dtype_by_itself(big_world, dtype):
    def body():
        x, y = vector(3).astype(dtype), vector(3, 8).astype(dtype)
        same_gradients(lambda call, x, y: call(1, product, x, y), x, y)
        same_gradients(lambda call, x, y: call(2, product, y, x), x, y, call=fetched)

    big_world.drive(body)


def test_narrow_results_of_wide_arguments(big_world):
    def body():
        same_gradients(lambda call, x, y: call(1, halves, x, y), vector(3), vector(3, 8))

    big_world.drive(body)


def holomorphic(z):
    return z**2 + jnp.exp(z)


def test_complex_derivatives(big_world):
    def body():
        z = jnp.complex64(0.5 + 1.5j)
        with jd.context():
            found = jax.grad(lambda z: jd.rpc_sync(rank(1), holomorphic, args=(z,)), holomorphic=True)(z)
            size = jax.grad(lambda z: jnp.abs(jd.rpc_sync(rank(1), holomorphic, args=(z,))) ** 2)(z)
        same(found, 2 * z + jnp.exp(z))
        same(size, jax.grad(lambda z: jnp.abs(holomorphic(z)) ** 2)(z))

    big_world.drive(body)


def test_only_some_arguments_are_differentiated(big_world):
    def body():
        for program in (
            lambda call, x: call(1, product, x, np.float32(2.5)),
            lambda call, x: call(1, fast_product, 0.5, x),
            lambda call, x: call(1, layer, {"w": x, "b": np.ones(2, np.float32)}, np.ones((1, 3), np.float32)),
            lambda call, x: call(
                1, layer, params={"b": x[0], "w": jnp.ones((3, 2))}, x=jnp.ones((1, 3)), scale=x.sum()
            ),
        ):
            same_gradients(program, vector((3, 2)))

    big_world.drive(body)


def weighted(tree, *, weights, name):
    assert name == "by name"
    return jax.tree.map(lambda leaf: leaf * weights["w"] ** 2, tree)


def test_keyword_arguments_and_trees_with_holes(big_world):
    def body():
        def program(call, tree, w):
            return call(1, weighted, tree, weights={"w": w, "unused": None}, name="by name")

        same_gradients(program, {"z": vector(2), "a": [vector((2, 1), 3), None, ()]}, vector((), 4))

    big_world.drive(body)


def test_the_same_array_passed_twice(big_world):
    def body():
        same_gradients(lambda call, x: call(1, product, x, x), vector(3))
        same_gradients(lambda call, x: call(1, weighted, [x, x], weights={"w": x}, name="by name"), vector(3))

    big_world.drive(body)


def test_an_argument_handed_back_as_it_is(big_world):
    def body():
        same_gradients(lambda call, x, y: call(1, swap, x, y), vector(3), vector((2, 2)))

    big_world.drive(body)


def swap(x, y):
    return y, x, x


def several(x):
    return jnp.sin(x), jnp.cos(x), {"unused": jnp.exp(x), "index": jnp.argmax(x)}


@pytest.mark.parametrize("way", WAYS)
def test_unused_outputs(big_world, way):
    def body():
        for used in (0, 1):
            same_gradients(lambda call, x, used=used: call(1, several, x)[used] * 2, vector(3), call=way)
        same_gradients(lambda call, x: x * call(1, several, x)[2]["index"], vector(3), call=way)

    big_world.drive(body)


def test_no_output_used(big_world):
    def body():
        def program(call, x):
            call(1, several, x)
            call(2, fast_product, x, x)
            return x**2

        for way in WAYS:
            same_gradients(program, vector(3), call=way)

    big_world.drive(body)


def constant(x):
    return jnp.arange(3.0) + jnp.zeros_like(x)


def nothing(x):
    return None


def test_results_that_do_not_depend_on_arguments(big_world):
    def body():
        same_gradients(lambda call, x: call(1, constant, x) * x, vector(3))
        same_gradients(lambda call, x: (call(1, nothing, x), x * 2), vector(3))

    big_world.drive(body)


def scale_by_python(x, factor, flag):
    return x * factor if flag else x


def test_python_numbers_among_the_arguments(big_world):
    def body():
        for factor, flag in ((2, True), (2.5, True), (7, False)):
            same_gradients(lambda call, x: call(1, scale_by_python, x, factor, flag), vector(3))  # noqa: B023
        same_gradients(lambda call, factor: call(1, scale_by_python, jnp.ones(2), factor, True), 1.5)

    big_world.drive(body)


def empty_and_wide(x, empty):
    return jnp.concatenate([x, empty, x * 2])


def test_empty_arrays(big_world):
    def body():
        same_gradients(lambda call, x, empty: call(1, empty_and_wide, x, empty), vector(3), vector(0))

    big_world.drive(body)


def applied(matrix, x):
    return matrix @ x


def test_sparse_arrays(big_world):
    def body():
        indices = jnp.array([[0, 1], [2, 3], [2, 0]])

        def program(call, data, x):
            return call(1, applied, sparse.BCOO((data, indices), shape=(3, 4)), x)

        same_gradients(program, vector(3), vector(4))

    big_world.drive(body)


def test_large_arrays(big_world):
    def body():
        same_gradients(lambda call, x, y: call(1, product, x, y), vector((700, 300)), vector((700, 300), 2))

    big_world.drive(body)


def test_many_leaves(big_world):
    def body():
        tree = {f"leaf{k}": [vector((k % 5, 2), k), {"deep": vector((), k)}] for k in range(40)}
        same_gradients(
            lambda call, tree, w: call(1, weighted, tree, weights={"w": w}, name="by name"), tree, vector(())
        )

    big_world.drive(body)


def test_own_gradients_of_calls_to_oneself(big_world):
    def body():
        found = jd.value_and_grad(lambda x: jd.rpc_sync(0, chain_here, args=(x,)))(vector(3))
        same(found, jax.value_and_grad(lambda x: chain(serial, x))(vector(3)))

    big_world.drive(body)


def chain_here(x):
    return chain(sync, x)


def test_argnums_and_aux(big_world):
    def body():
        def loss(call):
            def run(x, y, params):
                out = call(1, layer, params, x, scale=y)
                return sum_squares(out), {"kept": out["h"] * 2}

            return run

        args = (vector((2, 3)), jnp.float32(1.5), parameters(3, 2))
        for argnums in (0, 2, (0, 1), (2, 1, 0)):
            found = jd.value_and_grad(loss(sync), argnums=argnums, has_aux=True)(*args)
            same(found, jax.value_and_grad(loss(serial), argnums, has_aux=True)(*args))
        same(jd.grad(loss(sync), has_aux=True)(*args), jax.grad(loss(serial), has_aux=True)(*args))

    big_world.drive(body)


def make_parameters(n, m):
    return parameters(n, m)


def own_rank(x):
    return x * jd.worker_info().rank


def test_gradients_of_references_stay_with_their_owners(big_world):
    """Whether the callee owns the parameters or a third worker does."""

    def body():
        x = vector((2, 3))
        for owner in range(jd.world_size()):
            rref = jd.remote(owner, make_parameters, args=(3, 2))
            serially = jax.value_and_grad(lambda p: sum_squares(layer(p, x)))(rref.to_here())
            for callee in range(jd.world_size()):
                function = (layer, fast_layer)[(owner + callee) % 2]
                loss = lambda p: sum_squares(jd.rpc_sync(callee, function, args=(p, x)))  # noqa: B023, E731
                value, gradient = jd.value_and_grad(loss)(rref)
                assert gradient.owner.rank == owner
                same((value, gradient.to_here()), serially)
                del gradient

    big_world.drive(body)


def test_a_reference_used_here_and_there(big_world):
    """Fetched, passed to two workers, and used in a call nobody needs."""

    def program(call, p, x):
        call(0, layer, p, x)
        return sum_squares(call(1, fast_layer, p, x)) * sum_squares(call(2, layer, p, x * 2))

    def body():
        x = vector((2, 3))
        rref = jd.remote(rank(1), make_parameters, args=(3, 2))
        loss = lambda p, x: program(sync, p, x) + rref_sum(p)  # noqa: E731
        value, (of_p, of_x) = jd.value_and_grad(loss, argnums=(0, 1))(rref, x)
        expected = jax.value_and_grad(lambda p, x: program(serial, p, x) + sum_squares(p), argnums=(0, 1))
        same((value, (of_p.to_here(), of_x)), expected(rref.to_here(), x))

    big_world.drive(body)


def rref_sum(rref):
    return sum_squares(rref.to_here())


def test_references_in_a_pytree_of_arguments(big_world):
    def body():
        refs = {"a": [jd.remote(rank(k), make_parameters, args=(3, k + 1)) for k in range(3)]}
        x = vector((2, 3))

        def loss(call):
            return lambda refs: sum(sum_squares(call(k + 1, layer, p, x)) for k, p in enumerate(refs["a"]))

        value, gradients = jd.value_and_grad(loss(sync))(refs)
        values = {"a": [rref.to_here() for rref in refs["a"]]}
        same((value, {"a": [one.to_here() for one in gradients["a"]]}), jax.value_and_grad(loss(serial))(values))

    big_world.drive(body)


def test_hessian_through_a_reference_nobody_differentiates(big_world):
    def body():
        rref, x = jd.remote(rank(2), make_parameters, args=(3, 2)), vector(3)
        loss = lambda p, call: lambda x: sum_squares(call(1, layer, p, x[None]))  # noqa: E731
        with jd.context():
            found = jax.jacrev(jax.grad(loss(rref, sync)))(x)
        same(found, jax.jacrev(jax.grad(loss(rref.to_here(), serial)))(x), rtol=1e-4, atol=1e-4)

    big_world.drive(body)


def test_a_reference_in_compiled_code(big_world):
    def body():
        rref, x = jd.remote(rank(1), make_parameters, args=(3, 2)), vector((2, 3))
        loss = lambda p, x: sum_squares(jd.rpc_sync(rank(2), fast_layer, args=(p, x)))  # noqa: E731
        with jd.context():
            value, (of_p, of_x) = jax.jit(jd.value_and_grad(loss, argnums=(0, 1)))(rref, x)
            found = value, (of_p.to_here(), of_x)
        both = jax.value_and_grad(lambda p, x: sum_squares(layer(p, x)), argnums=(0, 1))
        same(found, both(rref.to_here(), x))

    big_world.drive(body)


def own_and_fetch(x):
    rref = jd.RRef({"x": x * 2, "n": 3})
    return jd.rpc_sync(rank(1), doubled, args=(rref,)) * rref.local_value()["x"]


def doubled(tree):
    return tree["x"] * tree["n"]


def test_a_traced_value_given_to_a_reference(big_world):
    def body():
        with jd.context():
            found = jax.jacrev(own_and_fetch)(vector(3))
            second = jax.jacrev(jax.jacrev(own_and_fetch))(vector(3))
        serially = lambda x: 6 * x * 2 * x  # noqa: E731
        same(found, jax.jacrev(serially)(vector(3)))
        same(second, jax.jacrev(jax.jacrev(serially))(vector(3)))

    big_world.drive(body)


def test_a_chain_of_references(big_world):
    """A reference made of a reference made of one: gradients pass from owner to owner."""

    def loss(remote, x):
        value = x
        for k in range(5):
            value = remote(k, value, x)
        return value

    def body():
        def remotely(k, value, x):
            return jd.remote(rank(k), product, args=(value, x))

        with jd.context():
            found = jax.jacrev(lambda x: loss(remotely, x).to_here())(vector(3))
            second = jax.grad(lambda x: jnp.sum(jax.grad(lambda x: loss(remotely, x).to_here()[1])(x)))(vector(3))
        serially = lambda x: loss(lambda k, value, x: product(value, x), x)  # noqa: E731
        same(found, jax.jacrev(serially)(vector(3)))
        same(second, jax.grad(lambda x: jnp.sum(jax.grad(lambda x: serially(x)[1])(x)))(vector(3)))

    big_world.drive(body)


def compiled_so_far():
    return current_worker().rank, count_traces.count


class count_traces:
    count = 0


@jax.jit
def counted(x, y):
    count_traces.count += 1
    return jnp.sin(x) * y


def uncounted(x, y):
    count_traces.count += 1
    return jnp.sin(x) * y


def traces(function, shapes):
    before = jd.rpc_sync(rank(1), compiled_so_far)[1]
    for shape in shapes:
        x = vector(shape)
        with jd.context():
            same(
                jax.grad(lambda x: jnp.sum(jd.rpc_sync(rank(1), function, args=(x, x))))(x), jnp.cos(x) * x + jnp.sin(x)
            )
    return jd.rpc_sync(rank(1), compiled_so_far)[1] - before


def test_jitted_functions_compile_once_per_shape_and_others_run_as_written(big_world):
    def body():
        assert traces(counted, [7, 7, 7, (2, 5), 7, (2, 5), (2, 5)]) == 2
        assert traces(counted, [7, (2, 5)]) == 0
        assert traces(uncounted, [7, 7, 7, 7]) == 4

    jax.clear_caches()
    big_world.drive(body)
