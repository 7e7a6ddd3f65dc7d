"""Ctrl-C in blocks that put it off until they end, and in waits."""

import concurrent.futures
import os
import signal
import threading

import pytest
from helpers.interruptions import assert_not_left_locked

from jdistgrad.wire.interrupts import (
    SLICE_SECONDS,
    InterruptibleFuture,
    has_come,
    put_off_interrupt,
    wait_for_first,
    wait_in_slices,
)


def press():
    os.kill(os.getpid(), signal.SIGINT)


def test_it_comes_at_the_end_of_the_outermost_block():
    done = []

    def block():
        with put_off_interrupt():
            with put_off_interrupt():
                press()
                done.append(has_come())
            done.append(has_come())

    with pytest.raises(KeyboardInterrupt):
        block()
    assert done == [True, True]


def test_outside_of_blocks_the_programs_own_handler_is_called():
    pressed = []
    before = signal.signal(signal.SIGINT, lambda number, frame: pressed.append(number))
    try:
        with put_off_interrupt():
            press()
            assert pressed == []
        assert pressed == [signal.SIGINT]
        press()
        assert pressed == [signal.SIGINT] * 2
    finally:
        signal.signal(signal.SIGINT, before)


def test_a_program_that_ignores_interrupts_is_let_be():
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with put_off_interrupt():
            press()
            assert not has_come()
        assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGINT, before)


def test_a_handler_that_is_put_back_calls_what_it_called_before():
    first, second = [], []
    original = signal.signal(signal.SIGINT, lambda number, frame: first.append(number))
    try:
        with put_off_interrupt():
            saved = signal.signal(signal.SIGINT, lambda number, frame: second.append(number))
        with put_off_interrupt():
            pass
        signal.signal(signal.SIGINT, saved)
        press()
        assert (first, second) == ([signal.SIGINT], [])
    finally:
        signal.signal(signal.SIGINT, original)


def test_a_wait_ends_though_another_thread_has_received_the_signal():
    """The kernel may choose the thread, and then nothing wakes the main thread."""
    future = concurrent.futures.Future()
    release = threading.Timer(10, future.set_result, [None])
    release.start()
    threading.Timer(0.1, lambda: signal.pthread_kill(threading.get_ident(), signal.SIGINT)).start()
    with pytest.raises(KeyboardInterrupt):
        wait_for_first([future])
    assert not future.done()
    release.cancel()


def test_a_wait_takes_slices_until_it_is_done_or_its_time_has_passed():
    asked, left = [], [False, False, True]

    def wait(seconds):
        asked.append(seconds)
        return left.pop(0)

    wait_in_slices(wait)
    assert asked == [SLICE_SECONDS] * 3
    asked.clear()
    wait_in_slices(asked.append, timeout=0.0)
    assert asked == [0.0]
    with pytest.raises(TimeoutError):
        InterruptibleFuture().result(timeout=0.3)


def test_a_future_that_was_cancelled_is_done():
    future = InterruptibleFuture()
    future.cancel()
    wait_for_first([future])
    with pytest.raises(concurrent.futures.CancelledError):
        future.exception()


@pytest.mark.parametrize("ask", ["done", "exception", "result"])
def test_a_handler_that_raises_leaves_no_future_locked(ask):
    def make():
        future = InterruptibleFuture()
        future.set_result(1)
        return future

    assert_not_left_locked(make, lambda future: getattr(future, ask)(), lambda future: future.done())
