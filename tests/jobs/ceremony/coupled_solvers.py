"""Two solvers on two workers, coupled by a fixed point: the derivative is implicit, by one linear solve."""

import jax
import jax.numpy as jnp
import optimistix as optx

import jdistgrad as jd


@jax.jit
def fluid(load, stiffness):
    return jnp.cos(load) / (1 + stiffness)


@jax.jit
def structure(pressure, stiffness):
    return jnp.tanh(pressure) - 0.2 * stiffness * pressure**2


def coupled(load, stiffness):
    return jd.on(2, structure)(jd.on(1, fluid)(load, stiffness), stiffness)


def energy(stiffness):
    solver = optx.Newton(rtol=1e-6, atol=1e-6)
    return jnp.sum(optx.fixed_point(coupled, solver, jnp.zeros(3), args=stiffness).value ** 2)


me = jd.init()
if me.rank == 0:
    value, gradient = jax.jit(jax.value_and_grad(energy))(jnp.array([0.5, 1.0, 2.0]))
    print(f"energy {value:.5f}, gradient {' '.join(f'{one:.5f}' for one in gradient)}")
jd.shutdown()
