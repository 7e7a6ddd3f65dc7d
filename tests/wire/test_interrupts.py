"""Ctrl-C in blocks that put it off until they end, and in waits."""

import concurrent.futures
import os
import signal
import threading

import pytest

from jdistgrad.wire.interrupts import put_off_interrupt, wait_for_first


def press():
    os.kill(os.getpid(), signal.SIGINT)


def test_it_comes_at_the_end_of_the_block():
    done = []

    def block():
        with put_off_interrupt() as interrupt:
            press()
            done.append(interrupt.seen)

    with pytest.raises(KeyboardInterrupt):
        block()
    assert done == [True]


def test_it_passes_through_nested_blocks():
    done = []

    def block():
        with put_off_interrupt() as outer:
            with put_off_interrupt():
                press()
            done.append(outer.seen)

    with pytest.raises(KeyboardInterrupt):
        block()
    assert done == [True]


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
        with put_off_interrupt() as interrupt:
            press()
        assert not interrupt.seen
        assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGINT, before)


def test_other_threads_are_let_be():
    before, during = signal.getsignal(signal.SIGINT), []

    def block():
        with put_off_interrupt():
            during.append(signal.getsignal(signal.SIGINT))

    thread = threading.Thread(target=block)
    thread.start()
    thread.join()
    assert during == [before]


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


def test_a_wait_of_several_slices_ends_at_its_timeout_or_with_its_future():
    future = concurrent.futures.Future()
    wait_for_first([future], timeout=0.6)
    assert not future.done()
    threading.Timer(0.6, future.set_result, [None]).start()
    wait_for_first([future])
    assert future.done()
