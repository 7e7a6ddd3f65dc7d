"""The meetings of those that save together: what ends them."""

import contextvars
import threading
import time
import traceback

import jax.numpy as jnp
import pytest

import jdistgrad as jd
from jdistgrad.rpc.members.watchdog import calls_package
from jdistgrad.rpc.worker import current_worker
from jdistgrad.rpc.worlds.stacks import waits_of
from jdistgrad.saving.desk import Arrival, Desk, hold
from jdistgrad.threads import frames
from jdistgrad.wire.polling import poll

pytestmark = pytest.mark.one_process  # the failure of one rank ends a job


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
        Arrival("a meeting", None, [0, 1, 2], float("inf")).wait()

    with pytest.raises(RuntimeError, match="boom"):
        jd.spawn(main, 3)
    left = [one for one in set(threading.enumerate()) - before if "worker" in one.name]
    for thread in left:
        thread.join(2)  # those that have nothing to do stay for later worlds
        assert "_gathered" not in stack_of(thread)


def test_one_that_has_shut_down_is_not_awaited():
    both_were_told = threading.Barrier(2, timeout=60)  # who shuts down sooner is named to the other, and rightly

    def main():
        me = jd.init()
        said = ""
        if me.rank != 1:
            try:
                Arrival("a meeting", None, [0, 1, 2], float("inf")).wait()
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
        if me.rank == 2:
            jd.barrier()
        else:
            threading.Thread(target=contextvars.copy_context().run, args=(Arrival("a meeting", None).wait,)).start()
            assert poll(lambda: any("in a meeting, with" in one for one in waits_of(worker, time.monotonic())), 60)
            jd.barrier()
        if me.rank == 2:
            Arrival("a meeting", None).wait()
        jd.shutdown()

    jd.spawn(main, 3)


def test_who_waits_for_one_that_is_in_a_meeting_is_told_long_before_the_timeout():
    """As where rank 1 saves alone, or has more batches than another that answers its steps in a join block."""
    told = r"worker1 \(rank 1\) will not come, it waits for this worker elsewhere \(a meeting\), at .*save and restore"

    def main():
        me = jd.init()
        dp = jd.DataParallel(timeout=300)
        x = dp.average(jnp.ones(3))
        if me.rank == 1:
            Arrival("a meeting", None).wait()
        else:
            with pytest.raises(jd.WorkerLostError, match=told):
                dp.average(x)
        jd.shutdown()

    jd.spawn(main, 3)


def test_a_program_in_code_of_its_own_may_still_come_to_a_meeting():
    """Its threads may take steps beside it."""
    inside, outside, end = threading.Event(), threading.Event(), threading.Event()

    def waits_inside():
        inside.set()
        poll(end.is_set, 60)

    def waits_outside():
        outside.set()
        end.wait(60)

    threads = [threading.Thread(target=each) for each in (waits_inside, waits_outside)]
    for one in threads:
        one.start()
    assert inside.wait(60)
    assert outside.wait(60)
    assert poll(lambda: [calls_package(one.ident) for one in threads] == [True, False], 60)
    end.set()
    for one in threads:
        one.join()


def come_to_a_meeting():
    return sorted(Arrival("a meeting", jd.rank(), [1, 2], 60.0).wait().items())


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

    assert jd.spawn(main, 3)[0] == [[(1, 1), (2, 2)]] * 2


def test_those_who_go_on_come_to_the_next_meeting_of_the_name():
    desk = Desk()
    with jd.local_workers(3):
        meeting, _ = desk.arrive("a meeting", 0, [0], "first")
        found = []
        meeting.end.add_done_callback(lambda _: found.append(desk.arrive("a meeting", 0, [0], "second")))
        hold(desk, meeting, 1.0)
    assert meeting.end.result() == {0: "first"}
    (next_meeting, first_there), *_ = found
    assert first_there
    assert next_meeting.said == {0: "second"}


def disagreeing(desk):
    """Return a meeting of worker 0 in which a disagreement with worker 2 was found, who serves since."""
    meeting, _ = desk.arrive("one thing", 0, None, "first")
    other, _ = desk.arrive("another thing", 2, None, "second")
    desk.compare(other, [0, 1])
    return meeting


def test_a_disagreement_counts_though_those_who_caused_it_serve_since():
    desk = Desk()
    with jd.local_workers(3):
        meeting = disagreeing(desk)
        hold(desk, meeting, 1.0)
    with pytest.raises(jd.DisagreementError, match="worker 0 in one thing"):
        meeting.end.result(0)


def test_one_who_comes_after_a_disagreement_is_told():
    desk = Desk()
    with jd.local_workers(3):
        meeting = disagreeing(desk)
        hold(desk, meeting, 1.0)
        assert desk.arrive("one thing", 1, None, "late") == (meeting, False)
        next_meeting, first_there = desk.arrive("one thing", 1, None, "once more")
    assert first_there
    assert next_meeting is not meeting


def test_who_was_told_in_another_meeting_is_not_told_again():
    desk = Desk()
    with jd.local_workers(3):
        hold(desk, disagreeing(desk), 1.0)
        assert desk.arrive("one thing", 2, None, "now too")[1]


def test_those_who_were_told_meet_again_before_both_meetings_have_ended():
    desk = Desk()
    with jd.local_workers(3):
        meeting, _ = desk.arrive("one thing", 0, None, "first")
        other, _ = desk.arrive("another thing", 2, None, "second")
        desk.compare(other, [0, 1])
        assert desk.arrive("one thing", 1, None, "late") == (meeting, False)
        hold(desk, meeting, 1.0)
        again, first_there = desk.arrive("one thing", 1, None, "again")
        assert first_there
        for one, missing in ((again, [0, 2]), (other, [0, 1])):
            desk.compare(one, missing)
        assert again.disagreement is None


def test_one_who_was_told_elsewhere_comes_to_the_next_meeting_of_the_name():
    desk = Desk()
    with jd.local_workers(3):
        meeting = disagreeing(desk)
        again, first_there = desk.arrive("one thing", 2, None, "again")
        assert first_there
        hold(desk, meeting, 1.0)
        assert desk.arrive("one thing", 0, None, "again") == (again, False)


def test_one_who_comes_late_joins_those_who_have_come_together_again():
    desk = Desk()
    with jd.local_workers(3):
        hold(desk, disagreeing(desk), 1.0)
        again, first_there = desk.arrive("one thing", 0, None, "again")
        assert first_there
        assert desk.arrive("one thing", 1, None, "late") == (again, False)


def test_one_that_missed_a_failed_meeting_holds_none_without_those_that_were_there():
    desk = Desk()
    with jd.local_workers(3):
        hold(desk, disagreeing(desk), 1.0)  # without worker 1
        alone, _ = desk.arrive("a third thing", 1, None, "alone")
        with pytest.raises(jd.DisagreementError, match="worker 1, which is in a third thing, did not"):
            desk.close(alone)
        desk.close_failed(alone)
        once_more, _ = desk.arrive("a fourth thing", 1, None, "alone")
        desk.close(once_more)


def test_a_missed_meeting_does_not_count_once_all_have_come_together():
    desk = Desk()
    with jd.local_workers(3):
        hold(desk, disagreeing(desk), 1.0)
        for rank in range(3):
            together, _ = desk.arrive("a third thing", rank, None, "here")
        desk.close(together)
        alone, _ = desk.arrive("a fourth thing", 1, None, "alone")
        desk.close(alone)
