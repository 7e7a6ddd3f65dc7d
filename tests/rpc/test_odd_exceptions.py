"""Exceptions with odd methods, some of which raise: the caller gets an answer."""

import concurrent.futures

import pytest
from helpers.worlds import last, on_worker0, still_works, wire_world as wire_world

import jdistgrad as jd

SECONDS = 20  # timeout of calls that would never be answered if the test failed


class TruthlessError(Exception):
    def __bool__(self):
        raise RuntimeError("neither true nor false")


class FalseError(Exception):
    def __len__(self):
        return 0


class NotelessError(Exception):
    def add_note(self, note):
        raise RuntimeError("no notes")


class NotedError(Exception):
    """An exception whose notes are not text and cannot be pickled."""

    def __init__(self, *args):
        super().__init__(*args)
        self.__notes__ = [lambda: 0]


class TextlessError(Exception):
    def __str__(self):
        raise RuntimeError("no text")


class UncopiedError(Exception):
    def __init__(self, a, b):
        super().__init__(f"{a} and {b}")
        self.both = (a, b)

    def __copy__(self):
        return self


ODD = [TruthlessError, FalseError, NotelessError, NotedError, TextlessError, UncopiedError]


def fail(kind):
    raise kind(*(("one", "two") if kind is UncopiedError else ("odd",)))


def fail_later(kind):
    future = concurrent.futures.Future()
    try:
        fail(kind)
    except kind as error:
        future.set_exception(error)
    return future


def relayed(kind):
    return jd.rpc_sync(0, fail, args=(kind,), timeout=SECONDS)


@pytest.mark.parametrize("kind", ODD)
@pytest.mark.parametrize("function", [fail, fail_later, relayed])
@on_worker0
def test_an_odd_exception_arrives(world, kind, function):
    """The exception arrives with its own type, or as text if the wire cannot carry it."""
    with pytest.raises((kind, jd.RemoteError)):
        jd.rpc_sync(last(), function, args=(kind,), timeout=SECONDS)
    with pytest.raises((kind, jd.RemoteError)):
        jd.rpc_async(last(), function, args=(kind,), timeout=SECONDS).result()
    with pytest.raises((kind, jd.RemoteError)):
        jd.remote(last(), function, args=(kind,), timeout=SECONDS).to_here(timeout=SECONDS)
    still_works()


@pytest.mark.parametrize("kind", [TruthlessError, FalseError, NotelessError])
@on_worker0
def test_what_the_wire_can_carry_keeps_its_type(world, kind):
    with pytest.raises(kind, match="odd") as caught:
        jd.rpc_sync(last(), fail, args=(kind,), timeout=SECONDS)
    assert f"On worker{last()} (rank {last()}), in test_odd_exceptions.fail" in caught.value.__notes__[-1]


@on_worker0
def test_what_the_class_passed_on_otherwise_is_there(big_world):
    """The exception is copied, and put together from its parts after the wire, without calling its ``__init__``."""
    with pytest.raises(UncopiedError, match="one and two") as caught:
        jd.rpc_sync(last(), fail, args=(UncopiedError,), timeout=SECONDS)
    assert getattr(caught.value, "both", ("one", "two")) == ("one", "two")
