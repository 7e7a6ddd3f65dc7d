"""How the workers that save together find each other, and what ends their waits."""

import contextvars
import itertools
import threading
import time
import traceback

import pytest

import jdistgrad as jd
from jdistgrad.rpc.futures import CallFuture
from jdistgrad.rpc.waits import waits_of
from jdistgrad.rpc.worker import current_worker
from jdistgrad.saving import callers
from jdistgrad.threads import frames
from jdistgrad.wire.polling import poll

pytestmark = pytest.mark.one_process  # the failure of one rank ends a job


calls = itertools.count()


def meet(what, workers=None):
    return callers.meet(what, next(calls), workers)


def stack_of(thread):
    frame = frames().get(thread.ident)
    return [] if frame is None else [entry.name for entry in traceback.extract_stack(frame)]


def test_a_meeting_ends_with_its_world():
    waits, before = threading.Event(), set(threading.enumerate())

    def main():
        me = jd.init()
        if me.rank == 1:
            assert waits.wait(60)
            raise RuntimeError("boom")
        waits.set()
        meet("a meeting", (0, 1, 2))

    with pytest.raises(RuntimeError, match="boom"):
        jd.spawn(main, 3)
    left = [one for one in set(threading.enumerate()) - before if "worker" in one.name]
    for thread in left:
        thread.join(2)  # those that have nothing to do stay for later worlds
        assert "_wait_for_others" not in stack_of(thread)


def test_one_that_has_shut_down_is_not_awaited():
    both_were_told = threading.Barrier(2, timeout=60)  # who shuts down sooner is named to the other, and rightly

    def main():
        me = jd.init()
        said = ""
        if me.rank != 1:
            try:
                meet("a meeting", (0, 1, 2))
            except jd.MissingRanksError as error:
                said = str(error)
            both_were_told.wait()
        jd.shutdown()
        return said

    first, _, third = jd.spawn(main, 3)
    assert first == third
    assert "a meeting: worker1 (rank 1) will not come: shutdown() was called there" in first


def test_what_a_worker_waits_for_names_the_meeting():
    def main():
        me = jd.init()
        worker = current_worker()
        if me.rank < 2:
            threading.Thread(target=contextvars.copy_context().run, args=(meet, "a meeting")).start()
            assert poll(lambda: any("in a meeting, with" in one for one in waits_of(worker)), 60)
        jd.barrier()
        if me.rank == 2:
            meet("a meeting")
        jd.shutdown()

    jd.spawn(main, 3)


def come_to_a_meeting():
    return sorted(meet("a meeting", (1, 2)))


def test_workers_that_are_called_to_a_meeting_wait_for_one_that_is_called_later():
    def main():
        me = jd.init()
        said = []
        if me.rank == 0:
            first = jd.rpc_async(2, come_to_a_meeting)
            time.sleep(1.0)  # worker1 serves in ``shutdown`` and is asked whether it comes
            said = [jd.rpc_sync(1, come_to_a_meeting), first.result()]
        jd.shutdown()
        return said

    assert jd.spawn(main, 3)[0] == [[1, 2]] * 2


def test_ctrl_c_ends_a_wait_for_others_on_all_workers(tmp_path, monkeypatch):
    """Those that come later are told, instead of waiting for the one that has left."""
    result, presses = CallFuture.result, [KeyboardInterrupt()]

    def interrupted(future, *args):
        if presses and jd.rank() == 1:
            raise presses.pop()
        return result(future, *args)

    def main():
        me = jd.init()
        with pytest.raises(KeyboardInterrupt if me.rank == 1 else jd.CheckpointError, match=r"worker1|^$"):
            jd.save(tmp_path, 1)
        jd.shutdown()

    monkeypatch.setattr(CallFuture, "result", interrupted)
    jd.spawn(main, 3)
