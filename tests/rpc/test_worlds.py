"""The opening and closing of worlds."""

import operator
import os
import threading
import time

import jax
import jax.numpy as jnp
import pytest
from helpers.worlds import nap

import jdistgrad as jd
from jdistgrad.wire import launcher_env

pytestmark = pytest.mark.world(1, 3)


def test_nothing_works_before_init_or_after_shutdown(world):
    def main():
        for _ in range(2):
            for use in (jd.worker_info, jd.world_size, jd.shutdown, lambda: jd.RRef(1), lambda: jd.rpc_sync(0, nap)):
                with pytest.raises(jd.NotInitializedError, match=r"init\(\) was not called, or shutdown\(\) was"):
                    use()
            jd.init()
            jd.shutdown()

    world.run(main)


def test_names_by_role(world):
    def main():
        for names, expected in (
            ("trainer{rank}", "trainer{0}"),
            ([f"member{rank}" for rank in range(world.size)], "member{0}"),
            (lambda rank: f"role{rank}", "role{0}"),
        ):
            me = jd.init(names)
            assert me.name == expected.format(me.rank)
            assert jd.rpc_sync(expected.format(0), operator.add, args=(1, 2)) == 3
            assert jd.shutdown() == []

    world.run(main)


def test_ranks_are_known_before_init_and_after_shutdown(world):
    def main():
        ranks = [(jd.rank(), jd.local_rank())]
        me = jd.init()
        ranks += [(jd.rank(), jd.local_rank()), jd.rpc_sync(me.rank, both_ranks)]
        jd.shutdown()
        ranks.append((jd.rank(), jd.local_rank()))
        assert ranks == [(me.rank, int(os.environ.get("OMPI_COMM_WORLD_LOCAL_RANK", me.rank)))] * 4
        return me.rank

    assert world.run(main) == ([jd.rank()] if launcher_env.launched() else list(range(world.size)))


def both_ranks():
    return jd.rank(), jd.local_rank()


@pytest.mark.one_process
def test_a_thread_that_belongs_to_no_worker_has_no_rank(big_world):
    def main():
        jd.init()
        caught = []

        def ask():
            try:
                caught.append(jd.rank())
            except jd.NotInitializedError as error:
                caught.append(error)

        thread = threading.Thread(target=ask)
        thread.start()
        thread.join()
        assert isinstance(caught[0], jd.NotInitializedError)
        jd.shutdown()

    big_world.run(main)
    assert jd.rank() == jd.local_rank() == 0


def test_an_impatient_shutdown_fails_calls_on_both_sides(big_world):
    def main():
        me = jd.init()
        if me.rank == 0:
            future = jd.rpc_async(1, nap, args=(0.5,))
            jd.shutdown(graceful=False)
            with pytest.raises(jd.WorldClosedError):
                future.result(5)
        else:
            time.sleep(0.3)
            with pytest.raises(jd.WorkerLostError):
                jd.rpc_sync(0, nap, args=(5,))
            time.sleep(0.5)
            jd.shutdown(graceful=False)

    big_world.run(main)


def add_rank(x):
    return x + jd.rank()


def ask_server(x):
    return jd.rpc_sync("server", add_rank, args=(x,))


def test_compiled_calls_go_to_who_has_the_name_in_this_world(world):
    """The caller has the rank and the name that it had in the world for which they were compiled."""
    compiled = jax.jit(ask_server)
    staged = jd.jit(lambda x: compiled(x))

    def main(server):
        jd.init([f"worker{rank}" if rank != server else "server" for rank in range(world.size)])
        found = [float(step(jnp.zeros(()))) for step in (compiled, staged)]
        jd.shutdown()
        return found

    for server in range(world.size):
        assert all(found == [server] * 2 for found in world.run(main, server))


def test_a_world_inside_of_an_except_block_is_left_as_any_other(world):
    """The exception is older than the world, so the worker still waits for the others and serves them."""

    def main():
        try:
            raise ImportError("a fallback is taken")
        except ImportError:
            me = jd.init()
            if me.rank == jd.world_size() - 1:
                time.sleep(0.3)
                assert jd.rpc_sync(0, operator.add, args=(1, 2)) == 3
            return jd.shutdown()

    world.run(main)


def test_who_is_refused_may_call_again(world):
    def main():
        if jd.rank() == 0:
            with pytest.raises(ValueError, match="name"):
                jd.init(lambda rank: f"no name {rank}", timeout=20)
            with pytest.raises(ValueError, match="timeout"):
                jd.init(timeout="long")
        jd.init(lambda rank: f"name{rank}", timeout=20)
        with pytest.raises(jd.AlreadyInitializedError, match=rf"name\d .* is already in a world of {world.size}"):
            jd.init()
        with pytest.raises(ValueError, match="timeout"):
            jd.shutdown(timeout=0)  # the time that is left may have been counted down to nothing
        assert jd.rpc_sync("name0", jd.rank) == 0
        jd.shutdown()

    world.run(main)


def test_who_shuts_down_because_of_an_exception_keeps_nobody_waiting(big_world):
    why = r"worker0 \(rank 0\) is lost: it left with shutdown\(\) because of KeyError"

    def main():
        me = jd.init()
        try:
            if me.rank == 0:
                raise KeyError("no such data")
        except KeyError:
            jd.shutdown()
            return
        with pytest.raises(jd.WorkerLostError, match=why):
            jd.shutdown()

    big_world.run(main)
