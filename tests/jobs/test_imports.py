"""Messages that name a module which a worker is still importing wait for the end of the import."""

import pytest

SLOW = """
import dataclasses
import time

import jax
import jax.numpy as jnp

time.sleep(1)


@dataclasses.dataclass
class Shape:
    size: int


def f(x):
    return x + 1


@jax.jit
def compiled(x):
    return jnp.sin(x)


def sized(shape):
    return shape.size


class Model:
    def __init__(self, scale):
        self.scale = scale

    def __call__(self, x):
        return self.scale * x


def last(x):
    return 2 * x
"""

PROGRAM = """
import jax
import jax.numpy as jnp

import jdistgrad as jd

me = jd.init()
if me.rank == 0:
    import slow

    def step(x):
        y = jd.rpc_sync(1, slow.compiled, args=(x,))
        return jd.rpc_sync(1, slow.last, args=(y,)).sum()

    x = jnp.ones(3)
    futures = [
        jd.rpc_async(1, slow.f, args=(1,)),
        jd.rpc_async(1, slow.sized, args=(slow.Shape(2),)),
        jd.rpc_async(1, slow.Model(3.0), args=(2,)),
        jd.rpc_async(1, jax.tree.map, args=(slow.f, {"a": 1})),
        jd.rpc_async(1, slow.last, args=(1,)),
    ]
    references = [jd.remote(1, slow.f, args=(5,)), jd.remote(1, slow.Model, args=(4,))]
    with jd.context():
        value, gradient = jax.value_and_grad(step)(x)
    staged, same = jd.jit(jd.value_and_grad(step))(x)
    print([one.result() for one in futures], references[0].to_here(), references[1].rpc_sync().__call__(2))
    print(float(value) == float(staged), bool((gradient == same).all()))
elif MAIN_IMPORTS:
    import slow
jd.shutdown()
"""


@pytest.mark.parametrize("main_imports", [False, True], ids=["a serving thread imports", "the main thread imports"])
def test_messages_wait_for_an_import(mpi_job, tmp_path, main_imports):
    (tmp_path / "slow.py").write_text(SLOW)
    job = mpi_job(3, PROGRAM.replace("MAIN_IMPORTS", str(main_imports)))
    job.expect("[2, 2, 6.0, {'a': 2}, 2] 6 8", "True True", status=0)
