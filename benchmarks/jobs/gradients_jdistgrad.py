"""Job of gradients.py: rank 0 measures gradients across calls to rank 1 with jdistgrad."""

import pathlib
import statistics
import sys
import time

import jax
import jax.numpy as jnp
import optax

sys.path.insert(0, str(pathlib.Path(__file__).parents[1]))
from measure import median, report

import jdistgrad as jd


def chain(length):
    """Return a step of ``length`` calls, each of which takes the result of the call before."""

    def run(a, b):
        for _ in range(length):
            a = jd.rpc_sync(1, jnp.add, args=(a, b))
        return a.sum()

    return jd.jit(jd.value_and_grad(run, argnums=(0, 1)))


def in_context(step, *args):
    def run():
        with jd.context() as ctx:
            step(*args)
            jd.get_gradients(ctx)

    return run


def note(a, b):
    """Measure the example of PyTorch's note: a sum is made remotely and multiplied here."""
    step = jd.jit(jd.value_and_grad(lambda a, b: (jd.rpc_sync(1, jnp.add, args=(a, b)) * b).sum(), argnums=(0, 1)))
    return median(in_context(step, a, b), 1000)


def elementwise(size):
    a = jnp.ones((size, size))
    step = jd.jit(jd.value_and_grad(lambda a, b: jd.rpc_sync(1, jnp.multiply, args=(a, b)).sum(), argnums=(0, 1)))

    def run():
        with jd.context():
            jax.block_until_ready(step(a, a))

    return median(run, 50)


def random_values(seed):
    return jax.random.uniform(jax.random.key(seed), (3, 3))


@jax.jit
def loss_there(a, b):
    return (a + b).sum()


def eager(size):
    """Measure ``jax.value_and_grad`` of one call, not staged, in no context."""
    x = jnp.ones(size)
    step = jax.value_and_grad(lambda x: jd.on(1, jnp.multiply)(x, x).sum())
    return median(lambda: jax.block_until_ready(step(x)), 100)


@jax.jit
def decay(y, rate):
    return -rate * y


def solver():
    """Measure the gradient of diffrax's Tsit5 over a remote function, jitted; its calls, and a call alone."""
    import diffrax

    def last(rate):
        field = diffrax.ODETerm(lambda t, y, rate: jd.on(1, decay)(y, rate))
        adjoint = diffrax.RecursiveCheckpointAdjoint()
        found = diffrax.diffeqsolve(field, diffrax.Tsit5(), 0, 1, 0.1, jnp.ones(3), rate, max_steps=16, adjoint=adjoint)
        return found.ys.sum()

    step, rate = jax.jit(jax.value_and_grad(last)), jnp.float32(0.5)
    jax.block_until_ready(step(rate))
    with jd.timeline() as recorded:
        jax.block_until_ready(step(rate))
    calls = sum(event.kind == "call" and event.rank == 0 for event in recorded.events)
    found = [
        (
            median(lambda: jax.block_until_ready(step(rate)), 10),
            calls * median(lambda: jax.block_until_ready(jd.on(1, decay)(jnp.ones(3), rate)), 300),
        )
        for _ in range(5)
    ]
    return [statistics.median(each) for each in zip(*found, strict=True)]


def end_to_end(loss):
    """Measure the note's second example: the loss of the sum of two references, with a distributed optimizer.

    All iterations use the same references and the same optimizer. Returns the medians for a step of the optimizer that
    follows the staged function, and for one inside of it, in turn.
    """
    first, second = (jd.remote(1, random_values, args=(seed,)) for seed in (0, 1))
    optimizer = jd.DistributedOptimizer(optax.sgd(0.05), [first, second])
    gradients = jd.value_and_grad(loss, argnums=(0, 1))
    step = jd.jit(gradients)

    def apart():
        with jd.context() as ctx:
            step(first, second)
            optimizer.step(ctx)

    @jd.jit
    def train(a, b):
        loss, found = gradients(a, b)
        optimizer.step(found)
        return loss

    def inside():
        with jd.context():
            train(first, second)

    found = [(median(apart, 100), median(inside, 100)) for _ in range(5)]
    return [statistics.median(each) for each in zip(*found, strict=True)]


def open_contexts(count, a, b):
    """Return the seconds that the note's step takes in a context beside ``count`` open ones, each in a thread."""
    import threading

    opened, close = threading.Barrier(count + 1), threading.Event()
    step = jd.jit(jd.value_and_grad(lambda a, b: (jd.rpc_sync(1, jnp.add, args=(a, b)) * b).sum(), argnums=(0, 1)))

    def hold():
        with jd.context():
            step(a, b)
            opened.wait()
            close.wait()

    threads = [threading.Thread(target=hold) for _ in range(count)]
    for thread in threads:
        thread.start()
    opened.wait()
    time.sleep(0.1)
    seconds = median(in_context(step, a, b), 300)
    close.set()
    for thread in threads:
        thread.join()
    return seconds


def measure():
    a, b = jnp.ones((3, 3)), jnp.full((3, 3), 2.0)
    bare = median(lambda: jd.rpc_sync(1, jnp.add, args=(a, b)), 2000)
    chains = {
        f"chain_{length}": median(in_context(chain(length), a, b), 200 // length + 20) for length in (1, 8, 10, 100)
    }
    apart, inside = end_to_end(lambda a, b: (a.to_here() + b.to_here()).sum())
    loops = {"end_to_end": apart, "step_inside": inside}
    apart, inside = end_to_end(lambda a, b: jd.rpc_sync(1, loss_there, args=(a, b)))
    loops |= {"loss_there": apart, "loss_there_inside": inside}
    solved, alone = solver()
    report(eager=eager(1000), solver=solved, solver_calls=alone)
    report(bare=bare, note=note(a, b), large=elementwise(1024), **loops, **chains)
    report(**{f"contexts_{count}": open_contexts(count, a, b) for count in (1, 10, 100)})


def main():
    me = jd.init()
    if me.rank == 0:
        measure()
    jd.shutdown()


if __name__ == "__main__":
    main()
