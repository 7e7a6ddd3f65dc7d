"""Ctrl-C at a safe place."""

import os
import signal
import threading

import pytest

from jdistgrad.wire.interrupts import put_off_interrupt

pytestmark = pytest.mark.one_process


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


def test_the_handler_of_before_is_back():
    before = signal.getsignal(signal.SIGINT)
    with put_off_interrupt():
        assert signal.getsignal(signal.SIGINT) is not before
    assert signal.getsignal(signal.SIGINT) is before


def test_other_threads_are_let_be():
    before, during = signal.getsignal(signal.SIGINT), []

    def block():
        with put_off_interrupt():
            during.append(signal.getsignal(signal.SIGINT))

    thread = threading.Thread(target=block)
    thread.start()
    thread.join()
    assert during == [before]
