"""A process with many worlds after each other, such as a notebook's, keeps nothing of those that are closed."""

import gc
import threading
import weakref

import jax
import jax.numpy as jnp
import optax
import pytest

import jdistgrad as jd
from jdistgrad.rpc.worker import current_worker
from jdistgrad.wire.polling import poll

X = jnp.arange(3.0)


def meet():
    jd.barrier()


def average_in_a_program_too():
    tx = jd.average_gradients()
    state = tx.init(X)
    tx.update(X, state)
    jax.jit(tx.update)(X, state)


def train_alone():
    tx = jd.local_sgd(optax.sgd(0.1), every=1)
    tx.update(X, tx.init(X), X)


def step():
    dp = jd.DataParallel()
    dp.value_and_grad(lambda w: jnp.sum(w * w))(X)
    dp.jit(lambda w: dp.value_and_grad(jnp.sum)(w)[1])(X)


def in_a_program():
    everybody = jd.collectives.of_this_world()
    jax.jit(lambda x: everybody.allreduce(x) + 1)(X)


def beside_the_program():
    jd.collectives.of_this_world().start(lambda everybody: everybody.allreduce(X)).result(20)


def beside_workers():
    return {thread for thread in threading.enumerate() if thread.name.startswith("jdistgrad-worker")}


USES = [meet, average_in_a_program_too, train_alone, step, in_a_program, beside_the_program]


@pytest.mark.parametrize("use", USES)
def test_nothing_of_a_closed_world_is_kept(use):
    workers, before = [], beside_workers()

    def main():
        jd.init()
        workers.append(weakref.ref(current_worker()))
        use()
        jd.shutdown()

    def all_are_gone():
        gc.collect()
        return not any(worker() for worker in workers) and not beside_workers() - before

    jd.spawn(main, 3)
    assert poll(all_are_gone, 10)  # the threads of workers end after their worlds
