"""Exceptions of remote functions: type, causes and notes on the caller, and the chain of workers in the notes."""

import gc
import threading
import weakref

import pytest
from helpers.worlds import last, nap, needs_pickling, on_worker0, still_works, wire_world as wire_world

import jdistgrad as jd


class OwnError(Exception):
    def __init__(self, code, *, hint):
        super().__init__(f"code {code}\nhint: {hint}")
        self.code, self.hint = code, hint

    def __reduce__(self):
        return rebuild_own_error, (self.code, self.hint)


def rebuild_own_error(code, hint):
    return OwnError(code, hint=hint)


def raise_own_error():
    raise OwnError(7, hint="two\nlines")


@on_worker0
def test_a_remote_exception_keeps_its_type_its_fields_and_its_traceback(world):
    for _ in range(2):
        with pytest.raises(OwnError, match="code 7\nhint: two\nlines") as caught:
            jd.rpc_sync(last(), raise_own_error)
        assert (caught.value.code, caught.value.hint) == (7, "two\nlines")
        note = caught.value.__notes__[0]
        assert note.startswith(
            f"On worker{last()} (rank {last()}), in test_remote_exceptions.raise_own_error, called by worker0"
        )
        assert 'raise OwnError(7, hint="two\\nlines")' in note
    still_works()


def relay(path, function):
    return jd.rpc_sync(path[0], relay, args=(path[1:], function)) if path else function()


@on_worker0
def test_the_chain_of_workers_is_told(big_world):
    with pytest.raises(OwnError) as caught:
        jd.rpc_sync(1, relay, args=([2, 1], raise_own_error))
    heads = [note.splitlines()[0] for note in caught.value.__notes__]
    assert [head.split(" (rank")[0] for head in heads] == ["On worker1", "On worker2", "On worker1"]
    assert [head.rsplit("called by ")[1][:7] for head in heads] == ["worker2", "worker1", "worker0"]


class StubbornError(Exception):
    """An exception that cannot be rebuilt from its arguments."""

    def __init__(self, a, b):
        super().__init__(f"stubborn {a} and {b}")
        self.both = a, b


class UnsendableError(StubbornError):
    """An exception that cannot be sent either."""

    def __init__(self, a, b):
        super().__init__(a, b)
        self.lock = threading.Lock()


def raise_stubborn():
    raise StubbornError(1, 2)


def raise_unsendable():
    raise UnsendableError(1, 2)


class WordedError(Exception):
    """An exception that makes its text of an argument, as most do."""

    def __init__(self, code):
        super().__init__(f"no such code: {code}")
        self.code = code


class LateError(TimeoutError):
    def __init__(self, seconds):
        super().__init__(f"no such code: {seconds}")
        self.code = seconds


def raise_worded(kind):
    raise kind(7)


@pytest.mark.parametrize("kind", [WordedError, LateError])
@on_worker0
def test_an_exception_says_what_it_said_where_it_was_raised(world, kind):
    last = world.size - 1
    there, here = jd.remote(last, raise_worded, args=(kind,)), jd.remote(0, raise_worded, args=(kind,))
    asks = [lambda to=to: jd.rpc_sync(to, raise_worded, args=(kind,)) for to in (0, last)]
    for ask in (*asks, there.to_here, there.to_here, here.to_here):
        with pytest.raises(kind) as caught:
            ask()
        assert (str(caught.value), caught.value.code) == ("no such code: 7", 7)


class OwnGroup(ExceptionGroup):
    def derive(self, exceptions):
        return OwnGroup(self.message, exceptions)


def raise_several():
    inner = OwnGroup("inner", [UnsendableError(3, 4), OSError(2, "none")])
    inner.attempts = 3
    raise ExceptionGroup("outer", [StubbornError(1, 2), inner])


def call_all_that_fail():
    return jd.rpc_all([0, last()], raise_stubborn).result()


@on_worker0
def test_a_group_of_exceptions_keeps_them(big_world):
    with pytest.raises(ExceptionGroup) as caught:
        jd.rpc_sync(last(), raise_several)
    stubborn, inner = caught.value.exceptions
    assert (type(stubborn), stubborn.both) == (StubbornError, (1, 2))
    assert (type(inner), inner.message, inner.attempts) == (OwnGroup, "inner", 3)
    unsendable, missing = inner.exceptions
    assert (type(missing), missing.errno) == (FileNotFoundError, 2)
    assert "stubborn 3 and 4" in str(unsendable)
    assert "raise ExceptionGroup(" in caught.value.__notes__[-1]
    with pytest.raises(ExceptionGroup) as caught:
        jd.rpc_sync(last(), call_all_that_fail)
    for one in caught.value.exceptions:
        assert isinstance(one, StubbornError)
        assert "raise StubbornError(1, 2)" in one.__notes__[0]


@needs_pickling
@on_worker0
def test_an_exception_that_cannot_be_rebuilt_still_says_what_it_was(wire_world):
    with pytest.raises(jd.RemoteError, match=r"function raised .*UnsendableError: stubborn 1 and 2") as caught:
        jd.rpc_sync(last(), raise_unsendable)
    assert "raise UnsendableError(1, 2)" in caught.value.__notes__[0]
    still_works()


def leave():
    raise SystemExit(5)


@on_worker0
def test_exit_in_a_remote_function_does_not_end_the_caller(world):
    with pytest.raises(jd.RemoteError):
        jd.rpc_sync(last(), leave)
    still_works()


class HoldingError(Exception):
    """An exception whose argument is a reference."""


def raise_holding(rref):
    raise HoldingError(rref)


@needs_pickling
@on_worker0
def test_an_exception_that_holds_a_reference(wire_world):
    """The exception arrives as text, and no weight of the reference is lost."""
    rref = jd.remote(last(), nap, args=(0,))
    for _ in range(3):
        with pytest.raises(jd.RemoteError):
            jd.rpc_sync(last(), raise_holding, args=(jd.by_reference(rref),))
    assert rref.to_here() == 0


FAILING = {
    "rpc_sync": lambda to: jd.rpc_sync(to, raise_own_error),
    "rpc_async": lambda to: jd.rpc_async(to, raise_own_error).result(),
    "remote": lambda to: jd.remote(to, raise_own_error).to_here(),
    "rpc_all": lambda to: jd.rpc_all([to, 0], raise_own_error).result(),
    "too late": lambda to: jd.rpc_sync(to, nap, args=(0.2,), timeout=0.01),
    "no function": lambda to: jd.rpc_sync(to, jd),
    "a function without a name": lambda to: jd.rpc_sync(to, lambda: raise_own_error()),
}


class Large:
    pass


@pytest.mark.parametrize("way", FAILING)
@on_worker0
def test_what_callers_of_failed_calls_hold_goes_with_the_error(world, way):
    """No cycle of an error, its traceback and our frames, which only the garbage collector would find."""

    def caller():
        large = Large()
        held.append(weakref.ref(large))
        FAILING[way](last())

    held = []
    gc.collect()
    gc.disable()
    try:
        with pytest.raises((OwnError, jd.DistgradError, TypeError, ExceptionGroup)):
            caller()
        assert held[0]() is None
    finally:
        gc.enable()
    still_works()
