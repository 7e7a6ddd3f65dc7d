"""Meetings by calls, of ranks that are about to make collectives."""

import pytest

import jdistgrad as jd
from jdistgrad.data_parallel.collectives import by_calls
from jdistgrad.rpc.worker import current_worker

pytestmark = pytest.mark.one_process


def test_a_first_rank_in_shutdown_does_not_come():
    def main():
        me = jd.init()
        if me.rank == 2:
            told = r"worker0 \(rank 0\) will not come, it is in jdistgrad.shutdown\(\)"
            with pytest.raises(jd.WorkerLostError, match=told):
                by_calls.meet(current_worker(), [0, 2], "a group", "new collectives", 60.0)
        jd.shutdown()

    jd.spawn(main, 3)


def test_nothing_is_kept_of_a_meeting_that_a_rank_gives_up_after_its_end():
    with jd.local_workers(3):
        name = by_calls.Name("a group", (0, 2), 0)
        ends = [by_calls.come(name, place, f"word {place}") for place in (0, 1)]
        by_calls.give_up(name, 1, 1.0, "KeyboardInterrupt")
        assert ends[0].result(0) == ends[1].result(0) == by_calls.Outcome(["word 0", "word 1"], [], 0.0)
        kept = current_worker().kept["meetings"]
        assert not kept.ends
        assert not kept.words
