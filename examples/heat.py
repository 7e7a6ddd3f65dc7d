"""The heat equation on a rod that is cut over the ranks, differentiated with respect to its conductivity.

    jdistgrad run -n 3 examples/heat.py

Each rank simulates its part of the rod. In every step it gets the temperature of the nearest point from each of its
neighbours by ``shift``, whose transpose takes the sensitivities back across the cuts. So ``jax.grad`` of a rank's part
of the misfit is its part of the gradient of the whole misfit: also through ``jax.lax.scan``, in compiled code, and for
second derivatives. The program compares both with those of the rod in one piece.
"""

import functools

import jax
import jax.numpy as jnp

import jdistgrad as jd

POINTS, STEPS, DT = 48, 60, 0.2

PLACES = jnp.linspace(0.0, 1.0, POINTS)
START = jnp.exp(-50 * (PLACES - 0.4) ** 2)  # the rod has been heated here
TRUTH, GUESS = 1 + 0.5 * jnp.sin(6 * PLACES), jnp.ones(POINTS)  # its conductivity
DIRECTION = jnp.cos(9 * PLACES)


def with_neighbours(across, x):
    """Return a rank's points and one more at each end: the neighbour's, or at an end of the rod a copy of the last."""
    left = across.shift(x[-1:], wrap=False, edge=x[:1])
    right = across.shift(x[:1], by=-1, wrap=False, edge=x[-1:])
    return jnp.concatenate([left, x, right])


def in_one_piece(x):
    return jnp.pad(x, 1, mode="edge")


def simulate(conductivity, start, padded):
    """Return the temperatures at the end.

    Arguments:
      padded: adds a point at each end of an array of points.
    """
    between = padded(conductivity)
    between = (between[1:] + between[:-1]) / 2

    def step(temperature, _):
        return temperature + DT * jnp.diff(between * jnp.diff(padded(temperature))), None

    return jax.lax.scan(step, start, length=STEPS)[0]


def misfit(conductivity, start, measured, padded):
    return jnp.sum((simulate(conductivity, start, padded) - measured) ** 2)


@functools.partial(jax.jit, static_argnums=0)
def derivatives(padded, guess, truth, start, direction):
    """Return the gradient of the misfit, and the product of its matrix of second derivatives with a direction."""
    measured = simulate(truth, start, padded)
    gradient = jax.grad(functools.partial(misfit, start=start, measured=measured, padded=padded))
    return jax.jvp(gradient, (guess,), (direction,))


def main():
    me = jd.init()
    across = jd.collectives.of_this_world()
    mine = slice(POINTS * me.rank // across.size, POINTS * (me.rank + 1) // across.size)
    parts = [x[mine] for x in (GUESS, TRUTH, START, DIRECTION)]
    found = across.gather_rows(derivatives(functools.partial(with_neighbours, across), *parts))
    if me.rank == 0:
        for what, x, serial in zip(("gradient", "second derivatives"), found, serially(), strict=True):
            off = jnp.max(jnp.abs(x - serial)) / jnp.max(jnp.abs(serial))
            print(f"{what} on {across.size} ranks: {off:.0e} from those in one piece")
    jd.shutdown()
    return found


def serially():
    return derivatives(in_one_piece, GUESS, TRUTH, START, DIRECTION)


if __name__ == "__main__":
    main() if jd.launched() else jd.spawn(main, 3)
