"""The board where threads meet: what a thread leaves when a signal's handler raises in it."""

import math

from helpers.interruptions import assert_not_left_locked

from jdistgrad.data_parallel.collectives.board import Board, Letter, Letters


def never():
    pass


def test_a_handler_that_raises_leaves_the_board_usable():
    def use(board):
        board.exchange(0, "sum", 1, math.inf, never)

    assert_not_left_locked(lambda: Board(1), use, lambda board: board.pin(0, "sum", 2))


def test_a_handler_that_raises_leaves_the_letters_usable():
    letter = Letter("float32 ()", b"1234")

    def use(letters):
        letters.put(0, 1, 7, letter)
        assert letters.next(0, 1, 7, 10.0, never) == [letter]

    assert_not_left_locked(Letters, use, lambda letters: letters.put(1, 0, 7, letter))
