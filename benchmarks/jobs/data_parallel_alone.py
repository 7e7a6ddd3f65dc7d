"""Job of data_parallel.py: two ranks train without each other, and measure the memory that this takes."""

import jax
from data_parallel_jdistgrad import memory, report

import jdistgrad as jd

if __name__ == "__main__":
    me = jd.init()
    found = memory(lambda loss: jax.jit(jax.value_and_grad(loss)))
    if me.rank == 0:
        report(memory=found)
    jd.shutdown()
