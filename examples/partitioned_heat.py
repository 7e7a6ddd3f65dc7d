"""The partitioned heat equation: two solvers on two workers, coupled in each time step, and the gradient of the whole.

    jdistgrad run -n 3 examples/partitioned_heat.py

The plate is that of preCICE's tutorial, cut in two: 1 + x^2 + alpha y^2 + beta t solves the heat equation on it. The
left solver, in JAX, gets temperatures at the cut and returns the heat that flows out there. The right solver, in plain
NumPy with a derivative by hand (legacy/heat_in_numpy.py), gets this heat and returns temperatures. optimistix finds the
temperatures on which both agree, and differentiates this fixed point implicitly.
"""

import jax
import jax.numpy as jnp
import lineax as lx
import numpy as np
import optimistix as optx
from legacy.heat_in_numpy import Part

import jdistgrad as jd

N, STEPS, DT = 10, 5, 0.1  # each half has a size of 1 x 1, and N x N cells
X, Y = np.indices((2 * N + 1, N + 1)) / N  # of the nodes
FREE = (X > 0) & (X < 2) & (Y > 0) & (Y < 1)  # at the other nodes, temperatures are given
WHOLE, LEFT, RIGHT = (Part(free, 1 / N, DT) for free in (FREE, (FREE & (X < 1))[: N + 1], FREE[N:]))
OF_LEFT, OF_RIGHT, CUT = np.flatnonzero(X <= 1), np.flatnonzero(X >= 1), np.flatnonzero(FREE & (X == 1))
CUT_LEFT, CUT_RIGHT = slice(-N, -1), slice(1, N)  # the same nodes among those of each half
SOLVER, ADJOINT = optx.FixedPointIteration(1e-13, 1e-13), optx.ImplicitAdjoint(lx.GMRES(1e-13, 1e-13))


@jax.jit
def left_solver(at_cut, conductivity, heated, given):
    """Return the temperatures of the left half, and the heat that flows out of it through the cut."""
    jax.debug.callback(LEFT.solves.update, ["forward"])
    conductivity, heat = conductivity[: N * N], LEFT.capacity * heated[OF_LEFT]
    found = jnp.linalg.solve(*LEFT.equations(conductivity, heat, given[OF_LEFT].at[CUT_LEFT].set(at_cut)))
    return found, (heat - LEFT.matrix(conductivity) @ found)[CUT_LEFT]


def in_numpy(method, results, *args):
    return jax.pure_callback(lambda *args: method(*map(np.asarray, args)), results, *args)


solve_right = jax.custom_vjp(lambda *args: in_numpy(RIGHT.solve, args[-1], *args))
solve_right.defvjp(
    lambda *args: ((found := solve_right(*args)), (*args, found)),
    lambda kept, sensitivity: in_numpy(RIGHT.derivative, kept[:-1], *kept, sensitivity),
)


@jax.jit
def right_solver(flow, conductivity, heated, given):
    """Return the temperatures of the right half, into which this heat flows through the cut."""
    heat = (RIGHT.capacity * heated[OF_RIGHT]).at[CUT_RIGHT].add(flow)
    return solve_right(conductivity[N * N :], heat, given[OF_RIGHT])


def exchange(at_cut, args):
    """Return the temperatures of the plate for those at the cut, where the right solver may find others."""
    left, flow = jd.on("left", left_solver)(at_cut, *args)
    return jnp.append(left[: -N - 1], jd.on("right", right_solver)(flow, *args))


@jax.jit
def coupled(conductivity, heated, given):
    """Return the temperatures of the plate after a time step, by both workers."""

    def relaxed(at_cut, args):
        return (at_cut + exchange(at_cut, args)[CUT]) / 2

    args = conductivity, heated, given
    return exchange(optx.fixed_point(relaxed, SOLVER, given[CUT], args, adjoint=ADJOINT).value, args)


@jax.jit
def whole_plate(conductivity, heated, given):
    return jnp.linalg.solve(*WHOLE.equations(conductivity, WHOLE.capacity * heated, given))


def simulate(step, params):
    """Return the temperatures of the plate at the end, and what solves the equation if the conductivity is 1."""
    exact = [jnp.ravel(1 + X**2 + params["alpha"] * Y**2 + params["beta"] * DT * k) for k in range(STEPS + 1)]
    found = exact[0]
    for given in exact[1:]:
        found = step(params["conductivity"], found + DT * (params["beta"] - 2 - 2 * params["alpha"]), given)
    return found, given


def misfit(step, params):
    return jnp.mean((simulate(step, params)[0] - 3) ** 2)


def solves():
    """Return how many systems this worker's solver has solved, and how many transposes."""
    jax.effects_barrier()
    count = {"left": LEFT, "right": RIGHT}[jd.worker_info().name].solves
    return np.array([count["forward"], count["transposed"]])


def main():
    me = jd.init(["driver", "left", "right"], timeout=300)  # first calls compile, which may take long
    if me.name == "driver":
        params = {"alpha": 3.0, "beta": 1.2, "conductivity": jnp.ones(2 * N * N)}
        found, exact = simulate(coupled, params)
        print(f"temperatures: {jnp.max(abs(found - exact)):.0e} from the exact ones")
        params["conductivity"] += 0.3 * jnp.sin(jnp.arange(2.0 * N * N) / 30)
        with jd.context():  # the workers keep what their solvers found, until the block ends
            _, pullback = jax.vjp(lambda params: misfit(coupled, params), params)
            before = jd.on(("left", "right"), solves)()
            (gradient,) = pullback(1.0)
            (left, _), (right, transposed) = np.subtract(jd.on(("left", "right"), solves)(), before)
        pairs = zip(*map(jax.tree.leaves, (gradient, jax.grad(misfit, 1)(whole_plate, params))), strict=True)
        off = max(jnp.max(abs(one - other)) / jnp.max(abs(other)) for one, other in pairs)
        print(f"gradient by alpha, beta and 200 conductivities: {off:.0e} (relative) from that of one process")
        print(f"forward solves so far: {before[0][0]} left, {before[1][0]} right")
        print(f"in the backward pass: {left} left, {right} right; {transposed} solves of the transpose on the right")
    jd.shutdown()


if __name__ == "__main__":
    jax.config.update("jax_enable_x64", True)
    main() if jd.launched() else jd.spawn(main, 3)
