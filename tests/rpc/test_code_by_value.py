"""Functions and classes of a script that other workers do not have, or have otherwise: they travel by value."""

CLASSES = """
import dataclasses
import enum

import jax
import jax.numpy as jnp
import numpy as np

import jdistgrad as jd


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Data:
    a: jax.Array
    b: jax.Array


class Kind(enum.Enum):
    DOUBLE = 2


class Refused(Exception):
    pass


def product(data, kind):
    if kind is not Kind.DOUBLE:
        raise Refused(f"not {kind}")
    return Data(jnp.sin(data.a) * data.b * kind.value, data.a[:2])


def loss(call, x):
    result = call(product, Data(x, x[::-1]), Kind.DOUBLE)
    assert type(result) is Data
    return (result.a * result.b.sum()).sum()


me = jd.init()
if me.rank == 0:
    x = jnp.array([0.3, -1.2, 2.0])
    for to in (1, 2):
        with jd.context():
            found = jax.grad(lambda x: loss(lambda f, *args: jd.rpc_sync(to, f, args=args), x))(x)
            stays = jax.grad(lambda x: loss(lambda f, *args: jd.remote(to, f, args=args).to_here(), x))(x)
        expected = jax.grad(lambda x: loss(lambda f, *args: f(*args), x))(x)
        np.testing.assert_allclose(found, expected, rtol=1e-5)
        np.testing.assert_allclose(stays, expected, rtol=1e-5)
        try:
            jd.rpc_sync(to, product, args=(Data(x, x), "a word"))
        except Refused as error:
            print("caught:", error, flush=True)

    class Pair:
        def __init__(self, a, b):
            self.a, self.b = a, b

        def total(self):
            return self.a + self.b

    def total(pair):
        return Pair(pair.total(), type(pair).__name__)

    for to in (1, 2):
        found = jd.rpc_sync(to, total, args=(Pair(1, 2),))
        print(type(found) is Pair, found.a, found.b, flush=True)
jd.shutdown()
"""

FUNCTIONS = """
import functools
import pathlib
import sys
import tempfile

import jax
import jax.numpy as jnp
import numpy as np

import jdistgrad as jd


@jax.jit
def jitted(x):
    return 2 * x


@jax.custom_vjp
def ruled(x):
    return x


ruled.defvjp(lambda x: (x, None), lambda _, ct: (2 * ct,))


def came(function):
    vars(sys).setdefault("functions_that_came", []).append(function)
    return len({id(one) for one in sys.functions_that_came}), sys.modules["__main__"].jitted is function


def show(*functions):
    for function in functions:
        print(jd.grad(lambda x: jd.rpc_sync(1, function, args=(x,)))(1.0), end=" ", flush=True)


me = jd.init()
if me.rank == 0:
    show(jitted, ruled)
    print(jd.rpc_sync(1, came, args=(jitted,)))

    @jax.jit
    def jitted(x):
        return 3 * x

    ruled = jax.custom_vjp(lambda x: x)
    ruled.defvjp(lambda x: (x, None), lambda _, ct: (3 * ct,))

    @functools.partial(jax.jit, static_argnums=0)
    def power(n, x):
        return x if n == 0 else x * power(n - 1, x)

    def of_numbers():
        return functools.partial(jax.jit, static_argnums=0)(lambda n, x: x if n == 0 else n * x)

    show(jitted, ruled, functools.partial(power, 2), functools.partial(of_numbers(), 4))
    print(*(jd.rpc_sync(1, came, args=(jitted,)) for _ in range(2)), flush=True)

    # Functions without a name.
    folder = pathlib.Path(tempfile.mkdtemp())

    def traced():
        tempfile.mkstemp(dir=folder)
        return 0

    def traces():
        found = list(folder.iterdir())
        for one in found:
            one.unlink()
        return len(found)

    def made(scale):
        def scaled(x):
            traced()
            return jnp.sin(x) * scale

        return jax.jit(scaled)

    def with_rule(scale):
        function = jax.custom_vjp(made(scale))
        function.defvjp(lambda x: (function(x), x), lambda x, ct: (scale * jnp.cos(x) * ct,))
        return function

    held = jd.remote(2, jnp.full, args=(3, 4.0))
    functions = {
        "number": (made(3.0), 3),
        "array": (made(jnp.arange(3.0)), np.arange(3)),
        "large": (jax.jit(lambda x, large=np.full(600_000, 2.0, "float32"): jnp.sin(x) * large[:3] + traced()), 2),
        "rule": (with_rule(5.0), 5),
        "reference": (jax.jit(lambda x: jd.rpc_sync(2, jnp.multiply, args=(held, jnp.sin(x)))), 4),
    }
    x = jnp.array([0.3, -1.2, 2.0])
    for name, (function, scale) in functions.items():
        for to in (1, 2, 1):
            for _ in range(2):
                np.testing.assert_allclose(jd.rpc_sync(to, function, args=(x,)), np.sin(x) * scale, rtol=1e-5)
        print(name, traces(), flush=True)
    for scale in (2.0, 3.0, 2.0):
        np.testing.assert_allclose(jd.rpc_sync(1, made(scale), args=(x,)), np.sin(x) * scale, rtol=1e-5)
    print("anew", traces(), flush=True)
    loss = lambda x: jd.rpc_sync(1, functions["array"][0], args=(x,)).sum()
    for _ in range(4):
        np.testing.assert_allclose(jd.grad(loss)(x), np.cos(x) * np.arange(3), rtol=1e-5)
    print("gradients", traces(), flush=True)
jd.shutdown()
"""


def test_classes_of_the_program_are_those_of_the_other_side_or_travel_by_value(mpi_job):
    """Objects become instances of the receiver's classes: its JAX knows the pytree classes, and ``except`` matches."""
    job = mpi_job(3, CLASSES)
    job.expect("caught: not a word\ncaught: not a word")
    job.expect("True 3 Pair\nTrue 3 Pair")


def test_functions_that_one_side_has_defined_again_or_without_a_name_travel_by_value(mpi_job):
    """What has not been defined again is the receiver's own, and compiled once.

    A function without a name is compiled once more after a worker has asked for a function that it uses, which is sent
    with it from then on.
    """
    job = mpi_job(3, FUNCTIONS)
    job.expect("2.0 2.0 (1, True)\n3.0 3.0 3.0 4.0 (2, False) (2, False)")
    job.expect("number 2\narray 2\n", "rule 2\nreference 0\nanew 2\ngradients 0\n")
