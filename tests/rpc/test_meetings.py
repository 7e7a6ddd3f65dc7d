"""Meetings of workers, and letters from one to another."""

import queue
import time

import numpy as np
import pytest
from helpers.worlds import on_every_worker

import jdistgrad as jd
from jdistgrad.errors import MissingRanksError
from jdistgrad.rpc.meetings import Members
from jdistgrad.rpc.worker import current_worker


def members(ranks=None):
    worker = current_worker()
    return Members(worker, range(worker.size) if ranks is None else ranks, "a test")


@on_every_worker
def test_words_come_in_the_order_of_the_group(world, rank, size):
    backwards = list(reversed(range(size)))
    group, arrays = members(backwards), members()
    for turn in range(20):
        assert group.begin((turn, rank), "a meeting").wait(60) == [(turn, one) for one in backwards]
    large = np.full(50_000 + rank, rank, np.float32)  # travels beside the message
    for one, found in enumerate(arrays.begin({"x": large}, "a meeting").wait(60)):
        np.testing.assert_array_equal(found["x"], np.full(50_000 + one, one, np.float32))


@on_every_worker
def test_a_word_may_come_before_its_group_is_made(world, rank, size):
    if rank == 0:
        time.sleep(0.2)
    first, second = members(), members()  # two groups of the same workers do not mix
    later = second.begin("second", "a meeting")
    assert first.begin("first", "a meeting").wait(60) == ["first"] * size
    assert later.wait(60) == ["second"] * size


@on_every_worker
def test_letters_are_in_order_for_each_sender_and_tag(world, rank, size):
    group = members()
    others = [one for one in range(size) if one != rank]
    for number in range(3):
        for other in others:
            group.send(other, 7, ("seven", number, rank))
            group.send(other, 8, ("eight", number, rank))
    for other in others:
        assert [group.receive(other, 8, "a letter", 60) for _ in range(3)] == [("eight", k, other) for k in range(3)]
        assert [group.receive(other, 7, "a letter", 60) for _ in range(3)] == [("seven", k, other) for k in range(3)]


@on_every_worker
def test_a_letter_that_comes_too_late_is_the_next(world, rank, size):
    group, all_ = members(), members()
    if rank == 1:
        with pytest.raises(MissingRanksError):
            group.receive(0, 7, "a letter", 0.2)
    all_.begin(None, "the first is late").wait(60)
    if rank == 0 and size > 1:
        group.send(1, 7, "first")
        group.send(1, 7, "second")
    if rank == 1:
        assert [group.receive(0, 7, "a letter", 60) for _ in range(2)] == ["first", "second"]


@on_every_worker
def test_who_gives_up_ends_the_meetings_of_all(world, rank, size):
    group, all_ = members(), members()
    if size < 3:
        return
    if rank == 1:
        time.sleep(1)
        with pytest.raises(MissingRanksError):
            group.begin(rank, "the meeting").wait(60)
    else:
        with pytest.raises(MissingRanksError) as caught:
            group.begin(rank, "the meeting").wait(0.5 if rank == 0 else 60)
        assert caught.value.missing == [1]
    with pytest.raises(MissingRanksError):
        group.begin(rank, "the next").wait(60)
    assert all_.begin(rank, "others go on").wait(60) == list(range(size))


@on_every_worker
def test_several_threads_wait_at_once(world, rank, size):
    groups, found = [members() for _ in range(4)], queue.SimpleQueue()
    for k, group in enumerate(groups):
        current_worker().run(lambda k=k, group=group: found.put(group.begin((k, rank), "a meeting").wait(60)))
    assert sorted(found.get(timeout=60) for _ in groups) == [[(k, one) for one in range(size)] for k in range(4)]


@pytest.mark.one_process
def test_a_worker_in_shutdown_does_not_come():
    def main():
        me = jd.init()
        if me.rank == 2:
            with pytest.raises(jd.WorkerLostError) as caught:
                members([0, 2]).begin("word", "new collectives").wait(60.0)
            assert caught.value.worker.rank == 0
        jd.shutdown()

    jd.spawn(main, 3)
