"""Power iteration on a matrix whose blocks live on different workers: calls with arrays and references.

Every worker keeps a block of a tall matrix. Worker 0 finds the largest singular value by power iteration: in each
round it sends a vector to the owners of all blocks at once, and gets back each block's product. The blocks never travel
before the check at the end.

    jdistgrad run -n 3 examples/exchange.py
"""

import jax
import jax.numpy as jnp
from rich.progress import track

import jdistgrad as jd

ROWS, COLUMNS, ROUNDS = 500, 300, 200


def make_block(seed):
    """Make a block of the matrix, which stays on the worker that makes it. The blocks differ in height."""
    return jax.random.normal(jax.random.key(seed), (ROWS + 100 * seed, COLUMNS))


@jax.jit
def block_product(block, v):
    """Return this block's part of A' A v."""
    return block.T @ (block @ v)


def largest_singular_value(blocks):
    v = jnp.ones(COLUMNS) / jnp.sqrt(COLUMNS)
    for _ in track(range(ROUNDS), description="power iteration"):
        # A block arrives as its value, on the worker that owns it: only v travels.
        parts = [jd.on(block.owner, block_product).start(block, v) for block in blocks]
        product = sum(part.result() for part in parts)
        value = jnp.linalg.norm(product)
        v = product / value
    return jnp.sqrt(value)


def main():
    me = jd.init()
    if me.rank == 0:
        blocks = [jd.on(rank, make_block).keep(rank) for rank in range(jd.world_size())]
        found = largest_singular_value(blocks)
        whole = jnp.concatenate([block.to_here() for block in blocks])
        exact = jnp.linalg.svd(whole, compute_uv=False)[0]
        print(f"{jd.world_size()} workers hold a {whole.shape[0]} x {COLUMNS} matrix in unequal blocks")
        print(f"largest singular value: {found:.4f} by {ROUNDS} rounds of calls, {exact:.4f} by jnp.linalg.svd")
        assert abs(found - exact) < 0.01 * exact
    jd.shutdown()


if __name__ == "__main__":
    main()
