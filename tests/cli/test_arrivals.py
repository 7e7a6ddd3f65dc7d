"""What a launcher learns from the notes of ranks."""

from jdistgrad.cli.arrivals import Call, missing


def test_ranks_without_a_note_are_missing():
    assert missing(4, {0: Call(10, 1.0, 61.0), 2: Call(12, 1.5, 61.5)}) == [1, 3]
    assert missing(2, {}) == [0, 1]


def test_a_rank_that_came_when_another_had_given_up_is_missing():
    called = {0: Call(10, 1.0, 9.0), 1: Call(11, 8.9, 16.9), 2: Call(12, 9.01, 17.01)}
    assert missing(3, called) == [2]
