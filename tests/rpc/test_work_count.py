"""Counts of the messages that carry work."""

import gc

from helpers.interruptions import Sends

from jdistgrad.rpc.work_count import WorkCount
from jdistgrad.threads import started
from jdistgrad.wire.message import Kind


def test_garbage_that_sends_while_its_thread_counts_does_not_wait_for_that_thread():
    work, before = WorkCount(0, 3), gc.get_threshold()

    def count_often():
        for allocations in range(1, 40):
            gc.collect(0)
            Sends(lambda: work.sending(Kind.CALL, 1))
            gc.set_threshold(allocations)
            work.counts()
            gc.set_threshold(0)
        gc.collect(0)

    thread = started(count_often, "counts")
    thread.join(20)
    gc.set_threshold(*before)
    assert not thread.is_alive()
    assert work.counts() == (39, 0, 0)
