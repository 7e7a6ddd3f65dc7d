"""A process with many worlds after each other, such as a notebook's, keeps nothing of those that are closed."""

import gc
import threading
import weakref

import jax
import jax.numpy as jnp
import optax
import pytest

import jdistgrad as jd
from jdistgrad import pipeline as pp
from jdistgrad.rpc.worker import current_worker
from jdistgrad.wire.polling import poll

X = jnp.arange(3.0)


def meet():
    jd.barrier()


def average():
    tx = jd.average_gradients()
    tx.update(X, tx.init(X))


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


_raised = threading.Event()


class Late(jd.DataParallel):
    """It gives up a step when the step has raised its error here."""

    def abandon(self):
        assert _raised.wait(20)
        super().abandon()


def breaks(params, x):
    raise RuntimeError("the stage broke")


def fail_in_a_pipeline():
    """Each worker has both stages, whose failed step is told by one after the other."""
    rank = jd.rank()
    _raised.clear()
    averages = [jd.RRef(Late(jd.collectives.of_this_world([rank]))) for _ in range(2)]
    stages = [pp.Stage(breaks, jd.RRef(X), average=average) for average in averages]
    pipeline = jd.Pipeline(stages, pp.interleaved(1, 2, 2), loss=breaks, workers=[rank])
    with pytest.raises(RuntimeError, match="the stage broke"), jd.context():
        pipeline.step(jnp.ones((2, 3)), targets=jnp.ones(2))
    _raised.set()


def beside_workers():
    beside = "jdistgrad-reduce", "jdistgrad-collectives"
    return {thread for thread in threading.enumerate() if thread.name.startswith(beside)}


USES = [meet, average, average_in_a_program_too, train_alone, step, in_a_program, beside_the_program]


@pytest.mark.parametrize("use", [*USES, fail_in_a_pipeline])
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
