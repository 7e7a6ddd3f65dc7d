"""The table of recordings: a pull waits until its recording is there, and the last pull removes it."""

import threading

import pytest
from helpers.interruptions import assert_not_left_locked

from jdistgrad.autograd.tape.tape import PullbackTable
from jdistgrad.errors import ContextError


def found_by_a_thread(recordings, message):
    found = []

    def find():
        try:
            found.append(recordings.find(message, last=False))
        except ContextError as error:
            found.append(error)

    thread = threading.Thread(target=find)
    thread.start()
    return thread, found


def test_a_pull_waits_for_its_recording_and_for_no_other():
    recordings = PullbackTable()
    thread, found = found_by_a_thread(recordings, 7)
    recordings.keep(8, "another")
    thread.join(0.05)
    assert thread.is_alive()
    recordings.keep(7, "mine")
    thread.join(5)
    assert found == ["mine"]
    assert len(recordings) == 2


def test_the_last_pull_takes_it_away():
    recordings = PullbackTable()
    recordings.keep(7, "mine")
    assert [recordings.find(7, last=False), recordings.find(7, last=True)] == ["mine", "mine"]
    assert len(recordings) == 0
    with pytest.raises(ContextError, match=r"has been pulled back for the last time: differentiate the whole"):
        recordings.find(7, last=False)


def test_closing_ends_every_wait():
    recordings = PullbackTable()
    thread, found = found_by_a_thread(recordings, 7)
    recordings.close()
    thread.join(5)
    assert "closed before message" in str(found[0])
    with pytest.raises(ContextError, match="closed before message"):
        recordings.find(9, last=True)


def test_a_handler_that_raises_leaves_the_table_usable():
    def use(recordings):
        recordings.keep(7, "mine")
        recordings.find(7, last=False)

    assert_not_left_locked(PullbackTable, use, len)
