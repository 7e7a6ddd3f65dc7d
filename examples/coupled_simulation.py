"""Two coupled simulations on two workers, and an inverse problem that is solved through both.

    jdistgrad run -n 3 examples/coupled_simulation.py

The air is a JAX program. The sea is plain NumPy, as legacy code would be: a column of water that mixes, is warmed from
above, and cools; its derivative is written by hand. In each exchange both simulations get the heat that flows between
the air and the surface of the sea, and run at the same time. Only the air was measured. Which temperatures did the
water have at the beginning? Every step of the search differentiates through all exchanges and both simulations.
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax

import jdistgrad as jd

LAYERS, EXCHANGES, SUBSTEPS, DT = 3, 8, 10, 0.05
MIXING, COOLING, TRANSFER = 0.8, 0.02, 0.6
STEPS, RATE = 150, 0.15

MIX = MIXING * (np.diag(np.ones(LAYERS - 1), 1) + np.diag(np.ones(LAYERS - 1), -1) - 2 * np.eye(LAYERS))
MIX[0, 0] = MIX[-1, -1] = -MIXING


def sea_states(water, heat):
    """Return the temperatures at the beginning of each substep and at the end: the legacy code."""
    states = [np.asarray(water, np.float32)]
    for _ in range(SUBSTEPS):
        change = MIX @ states[-1] - COOLING * states[-1] ** 3
        change[0] += heat
        states.append((states[-1] + DT * change).astype(np.float32))
    return states


def sea_derivative(water, heat, sensitivity):
    """Return the sensitivities to the temperatures at the beginning and to the heat, from those to the end's."""
    of_water, of_heat = np.asarray(sensitivity, np.float32), np.float32(0)
    for state in reversed(sea_states(water, heat)[:-1]):
        of_heat += np.float32(DT) * of_water[0]
        of_water = (of_water + DT * (MIX.T @ of_water - 3 * COOLING * state**2 * of_water)).astype(np.float32)
    return of_water, of_heat


def like(*values):
    return tuple(jax.ShapeDtypeStruct(jnp.shape(value), jnp.float32) for value in values)


@jax.custom_vjp
def sea(water, heat):
    """Return the temperatures of the water after one exchange in which it gets this heat."""
    (found,) = jax.pure_callback(lambda *args: (sea_states(*args)[-1],), like(water), water, heat)
    return found


sea.defvjp(
    lambda water, heat: (sea(water, heat), (water, heat)),
    lambda kept, sensitivity: jax.pure_callback(sea_derivative, like(*kept), *kept, sensitivity),
)


@jax.jit
def air(temperature, heat):
    """Return the temperature of the air after one exchange in which it loses this heat to the sea."""

    def substep(temperature, _):
        return temperature + DT * (1.0 - 0.1 * temperature - heat), None

    return jax.lax.scan(substep, temperature, length=SUBSTEPS)[0]


def simulate(water, air_worker="air", sea_worker="sea"):
    """Return the temperature of the air after each exchange."""
    temperature, measured = jnp.float32(4.0), []
    for _ in range(EXCHANGES):
        heat = TRANSFER * (temperature - water[0])
        warmed = jd.on(sea_worker, sea).start(water, heat)
        cooled = jd.on(air_worker, air).start(temperature, heat)
        water, temperature = warmed.result(), cooled.result()
        measured.append(temperature)
    return jnp.stack(measured)


def search(truth):
    """Return the temperatures found from measurements of the air, and the misfit in each step of the search."""
    measured = jd.jit(simulate)(truth)
    step = jd.jit(jd.value_and_grad(lambda water: jnp.sum((simulate(water) - measured) ** 2)))
    water, tx, misfits = jnp.full(LAYERS, 2.0), optax.adam(RATE), []
    state = tx.init(water)
    for _ in range(STEPS):
        misfit, gradient = step(water)
        updates, state = tx.update(gradient, state)
        water = optax.apply_updates(water, updates)
        misfits.append(float(misfit))
    return water, misfits


def main():
    me = jd.init(["search", "air", "sea"], timeout=300)  # first calls compile, which may take long
    found = None
    if me.name == "search":
        truth = jnp.array([3.0, 2.4, 1.5])
        water, misfits = found = search(truth)
        print(f"misfit {misfits[0]:.3g} -> {misfits[-1]:.3g}")
        print("layer  true  found")
        for layer, (was, now) in enumerate(zip(truth, water, strict=True)):
            print(f"{layer:5}  {was:4.2f}  {now:5.2f}")
    jd.shutdown()
    return found


if __name__ == "__main__":
    main() if jd.launched() else jd.spawn(main, 3)
