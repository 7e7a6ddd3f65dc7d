"""Messages that name a module which a worker is still importing wait for the end of the import."""

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
import contextvars
import threading

import jax
import jax.numpy as jnp

import jdistgrad as jd

me = jd.init()
if me.rank == 0:
    import slow

    def step(to, x):
        y = jd.rpc_sync(to, slow.compiled, args=(x,))
        return jd.rpc_sync(to, slow.last, args=(y,)).sum()

    def use(to):
        x = jnp.ones(3)
        futures = [
            jd.rpc_async(to, slow.f, args=(1,)),
            jd.rpc_async(to, slow.sized, args=(slow.Shape(2),)),
            jd.rpc_async(to, slow.Model(3.0), args=(2,)),
            jd.rpc_async(to, jax.tree.map, args=(slow.f, {"a": 1})),
            jd.rpc_async(to, slow.last, args=(1,)),
        ]
        references = [jd.remote(to, slow.f, args=(5,)), jd.remote(to, slow.Model, args=(4,))]
        mine = jax.tree_util.Partial(step, to)
        with jd.context():
            value, gradient = jax.value_and_grad(mine)(x)
        staged, same = jd.jit(jd.value_and_grad(mine))(x)
        print(to, [one.result() for one in futures], references[0].to_here(), references[1].rpc_sync().__call__(2))
        print(to, float(value) == float(staged), bool((gradient == same).all()))

    both = [threading.Thread(target=contextvars.copy_context().run, args=(use, to)) for to in (1, 2)]
    for one in both:
        one.start()
    for one in both:
        one.join()
elif me.rank == 2:
    import slow  # on the main thread; rank 1 imports it on a thread that serves
jd.shutdown()
"""


def test_messages_wait_for_an_import(mpi_job, tmp_path):
    (tmp_path / "slow.py").write_text(SLOW)
    job = mpi_job(3, PROGRAM)
    for to in (1, 2):
        job.expect(f"{to} [2, 2, 6.0, {{'a': 2}}, 2] 6 8", f"{to} True True")
