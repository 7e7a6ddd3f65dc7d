"""Exceptions and results with odd methods, many of which raise: the caller gets an answer, and the world can end."""

import concurrent.futures
import operator

import pytest
from helpers.worlds import last, needs_pickling, on_worker0, still_works, wire_world as wire_world

import jdistgrad as jd
from jdistgrad.wire import launcher_env

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


class LeavingError(Exception):
    """An exception whose copying or pickling ends the thread."""

    def __reduce__(self):
        raise SystemExit(3)


class UncopiedError(Exception):
    def __init__(self, a, b):
        super().__init__(f"{a} and {b}")
        self.both = (a, b)

    def __copy__(self):
        return self


ODD = [TruthlessError, FalseError, NotelessError, NotedError, TextlessError, LeavingError, UncopiedError]


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


class Leaving:
    def __reduce__(self):
        raise SystemExit(3)


@needs_pickling
@on_worker0
def test_a_result_that_ends_the_thread_when_it_is_pickled(wire_world):
    with pytest.raises(jd.EncodingError, match=r"cannot send the result of .*Leaving.*SystemExit: 3"):
        jd.rpc_sync(last(), Leaving, timeout=SECONDS)
    with pytest.raises(jd.EncodingError, match=r"SystemExit: 3"):
        jd.remote(last(), Leaving).to_here(timeout=SECONDS)
    still_works()


class LostInReduce:
    """A result that asks a third worker when it is pickled."""

    def __reduce__(self):
        raise jd.WorkerLostError("worker7 (rank 7) is lost: it was killed", worker=7)


@needs_pickling
@on_worker0
def test_a_result_that_needs_a_lost_worker_when_it_is_pickled(wire_world):
    with pytest.raises(jd.WorkerLostError, match=r"worker7 .* is lost") as caught:
        jd.rpc_sync(last(), LostInReduce, timeout=SECONDS)
    assert caught.value.worker == 7
    still_works()


class Returned:
    """A callable whose result is a future that cannot be waited for."""

    def __new__(cls):
        return UnwaitedFuture()


class UnwaitedFuture(concurrent.futures.Future):
    def add_done_callback(self, fn):
        raise SystemExit("no callbacks")


@on_worker0
def test_a_future_that_cannot_be_waited_for(world):
    with pytest.raises(jd.RemoteError, match="SystemExit: no callbacks"):
        jd.rpc_sync(last(), Returned, timeout=SECONDS)
    still_works()


class Secretive:
    """A callable that raises when its name, or another attribute that it lacks, is looked up."""

    def __call__(self):
        return 1

    def __getattr__(self, name):
        raise SystemError(f"there is no {name}")


@on_worker0
def test_a_function_that_must_not_be_asked(world):
    """Encoding the function looks up its name; calling the function does not."""
    if launcher_env.launched() and jd.world_size() > 1:
        with pytest.raises((SystemError, jd.EncodingError)):
            jd.rpc_sync(last(), Secretive(), timeout=SECONDS)
    else:
        assert jd.rpc_sync(last(), Secretive(), timeout=SECONDS) == 1
    assert jd.rpc_sync(last(), operator.add, args=(1, 2)) == 3


@pytest.mark.parametrize("kind", [NotelessError, TextlessError, LeavingError])
def test_an_odd_exception_of_a_main_ends_spawn(kind):
    def main():
        me = jd.init()
        if me.rank == 1:
            fail(kind)
        jd.shutdown(timeout=SECONDS)

    with pytest.raises(kind):
        jd.spawn(main, 3)
