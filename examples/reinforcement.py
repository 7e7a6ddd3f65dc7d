"""Reinforcement learning: several observers play, and one learner improves the policy that all of them use.

Worker 0 is the learner. In each round every other worker plays some episodes of cart and pole with the current policy.
The loss (REINFORCE, with the mean return as baseline) calls every observer, so JAX computes the policy's gradient
through the calls; observations and rewards never travel. In a world of one, worker 0 is learner and observer.

    jdistgrad run -n 3 examples/reinforcement.py
    python examples/reinforcement.py                       # the same as threads of one process
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax
from rich.progress import Progress, TextColumn

import jdistgrad as jd

ROUNDS, EPISODES, LONGEST, RATE = 45, 24, 100, 2e-2  # episodes of a round, over all observers


def init_policy(seed):
    first, second = jax.random.split(jax.random.key(seed))
    return {"hidden": jax.random.normal(first, (4, 16)) / 2, "output": jax.random.normal(second, (16,)) / 10}


def push_right(policy, state):
    """Return the logit of the probability to push the cart to the right."""
    return jnp.tanh(state @ policy["hidden"]) @ policy["output"]


def move(state, force):
    """Return the state of the classical cart and pole 0.02 s later, and whether the pole still stands."""
    x, speed, angle, spin = state
    sine, cosine = jnp.sin(angle), jnp.cos(angle)
    push = (force + 0.05 * spin**2 * sine) / 1.1
    turn = (9.8 * sine - cosine * push) / (0.5 * (4 / 3 - 0.1 * cosine**2 / 1.1))
    shove = push - 0.05 * turn * cosine / 1.1
    new = jnp.stack([x + 0.02 * speed, speed + 0.02 * shove, angle + 0.02 * spin, spin + 0.02 * turn])
    return new, (jnp.abs(new[0]) < 2.4) & (jnp.abs(new[2]) < 0.21)


def play(policy, key):
    """Play one episode. Return for each move its log probability, and whether the pole still stood."""
    begin, choose = jax.random.split(key)

    def step(carry, chance):
        state, alive = carry
        logit = push_right(policy, state)
        right = chance < jax.nn.sigmoid(jax.lax.stop_gradient(logit))
        state, stands = move(state, jnp.where(right, 10.0, -10.0))
        return (state, alive & stands), (jax.nn.log_sigmoid(jnp.where(right, logit, -logit)), alive)

    start = jax.random.uniform(begin, (4,), minval=-0.05, maxval=0.05), jnp.array(True)
    return jax.lax.scan(step, start, jax.random.uniform(choose, (LONGEST,)))[1]


@jax.jit
def observe(policy, keys):
    """Play episodes. Return a loss whose gradient is the policy gradient, and the episodes' mean length."""
    chances, alive = jax.vmap(play, (None, 0))(policy, keys)
    to_come = jnp.cumsum(alive[:, ::-1], axis=1)[:, ::-1]
    advantage = (to_come - to_come.mean(0)) / LONGEST
    return -(chances * advantage * alive).sum(1).mean(), alive.sum(1).mean()


def loss_fn(policy, keys, observers):
    """Let all observers play at once, each with keys of its own. Return the mean loss and the mean length."""
    played = [jd.on(one, observe).start(policy, part) for one, part in zip(observers, keys, strict=True)]
    losses, lengths = zip(*(one.result() for one in played), strict=True)
    return sum(losses) / len(losses), sum(lengths) / len(lengths)


def keys_of(number, observers):
    return jax.random.split(jax.random.key(number), (observers, EPISODES // observers))


def learn(step, observers):
    """Return the mean length of each round's episodes. ``step`` returns it with the loss, and the loss's gradient."""
    policy, tx, lengths = init_policy(0), optax.adam(RATE), []
    state = tx.init(policy)
    with Progress(*Progress.get_default_columns(), TextColumn("{task.fields[length]}")) as progress:
        task = progress.add_task("playing", total=ROUNDS, length="compiling")
        for number in range(ROUNDS):
            (_, length), gradient = step(policy, keys_of(number, observers))
            updates, state = tx.update(gradient, state)
            policy = optax.apply_updates(policy, updates)
            lengths.append(float(length))
            progress.update(task, advance=1, length=f"the pole stands for {lengths[-1]:.0f} of {LONGEST} moves")
    return lengths


def main():
    me = jd.init(timeout=300)  # first calls compile, which takes long on a busy machine
    lengths = None
    if me.rank == 0:
        observers = list(range(1, jd.world_size())) or [0]
        step = jd.jit(jd.value_and_grad(lambda policy, keys: loss_fn(policy, keys, observers), has_aux=True))
        lengths = learn(step, len(observers))
        print(
            f"{len(observers)} observers; the pole stood for {lengths[0]:.0f} moves, then {np.mean(lengths[-5:]):.0f}"
        )
    jd.shutdown()
    return lengths


if __name__ == "__main__":
    main() if jd.launched() else jd.spawn(main, 3)
