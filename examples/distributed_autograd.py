"""The first example of PyTorch's distributed autograd note: t1 + t2 on another worker, the rest here.

jdistgrad run -n 2 examples/distributed_autograd.py
python examples/distributed_autograd.py                # the same as threads of one process
"""

import jax
import jax.numpy as jnp

import jdistgrad as jd


@jax.jit
def my_add(t1, t2):
    """Add on the other worker. t1 and t2 arrive as values; their gradients go back to their owner."""
    return t1 + t2


def loss_fn(t1, t2, t4, to):
    t3 = jd.on(to, my_add)(t1, t2)
    t5 = t3 * t4
    return t5.sum()


def serial_gradients(t1, t2, t4):
    return jax.grad(lambda t1, t2: ((t1 + t2) * t4).sum(), (0, 1))(t1, t2)


def differentiate(to):
    """Return the gradients of t1 and t2 twice: from the context, and from JAX in one process."""
    t1, t2, t4 = (jax.random.uniform(jax.random.key(seed), (3, 3)) for seed in range(3))
    refs = jd.RRef(t1), jd.RRef(t2)
    with jd.context() as ctx:
        loss, _ = jd.backward(ctx, lambda t1, t2: loss_fn(t1, t2, t4, to), *refs)
        held = jd.get_gradients(ctx)
        print(f"loss {loss:.4f}; what was sent:\n{ctx.graph()}\n")
        found = [held[ref] for ref in refs]
    return found, serial_gradients(t1, t2, t4)


def main():
    me = jd.init()
    result = None
    if me.rank == 0:
        found, serial = result = differentiate(to=jd.world_size() - 1)
        for name, gradient, expected in zip(("t1", "t2"), found, serial, strict=True):
            print(
                f"gradient of {name}:\n{gradient}\nequal to the serial one: {bool(jnp.array_equal(gradient, expected))}"
            )
    jd.shutdown()
    return result


if __name__ == "__main__":
    main() if jd.launched() else jd.spawn(main, 2)
