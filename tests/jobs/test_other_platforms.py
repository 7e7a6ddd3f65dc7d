"""Compiled programs on other platforms than CPUs call other workers by JAX's callbacks; here a CPU does so too."""

from helpers.jobs import output_of

PROGRAM = """
import jax
import jax.numpy as jnp
import numpy as np
from jax.interpreters import mlir

import jdistgrad as jd
from jdistgrad.autograd.values import primitive

mlir.register_lowering(primitive.wire_p, primitive._lowered, platform="cpu")


def scaled(p, x):
    return jnp.sum(p * x)


def loss(call):
    return lambda p, x: jax.lax.fori_loop(0, 4, lambda _, total: total + call(p, 2.0), call(p, x))


if jd.init().rank == 0:
    x, reference = jnp.arange(3.0), jd.put(1, jnp.ones(3))
    expected = jax.grad(loss(scaled), argnums=(0, 1))(jnp.ones(3), x)
    for wrap in (lambda f: f, jax.jit, jd.jit):
        with jd.context() as ctx:
            found = wrap(jax.grad(loss(jd.on(2, scaled)), argnums=(0, 1)))(jnp.ones(3), x)
            np.testing.assert_allclose(found, expected, rtol=1e-6)
            of_reference = jd.jit(jd.grad(loss(jd.on(2, scaled))))(reference, x)
            np.testing.assert_allclose(jd.get(of_reference), expected[0], rtol=1e-6)  # a contribution in each iteration
    mapped = jax.jit(jax.vmap(jax.grad(jd.on(1, scaled), argnums=1), in_axes=(None, 0)))
    np.testing.assert_allclose(mapped(jnp.ones(3), jnp.ones((2, 3))), np.ones((2, 3)))
    print("all equal")
jd.shutdown()
"""


def test_gradients_by_callbacks_of_jax(tmp_path):
    (tmp_path / "program.py").write_text(PROGRAM)
    assert "all equal" in output_of(["-m", "jdistgrad", "run", "--local", "-n", "3", str(tmp_path / "program.py")])
