"""Remote functions that raise anything, never return, or return what cannot be sent: the worker serves on."""

import operator
import os
import random
import threading
from collections.abc import Callable, Iterator
from typing import Any

import jax.numpy as jnp

import jdistgrad as jd
from faults.outcomes import Outcome
from faults.program import judged

TIMEOUT = 0.5


class UnrebuildableError(Exception):
    """An exception that cannot be made from its arguments."""

    def __init__(self, one: str, *, other: str):
        super().__init__(one)
        self.other = other


class NoException(BaseException):
    """An exception that is no Exception."""


def raise_one(name: str) -> None:
    raise RAISED[name]()


def recurse(depth: int = 0) -> int:
    return recurse(depth + 1) + 1


def never() -> None:
    threading.Event().wait(3 * TIMEOUT)


def unsendable(name: str) -> Any:
    return UNSENDABLE[name]()


def with_a_lock() -> BaseException:
    error = ValueError("with a lock")
    error.lock = threading.Lock()  # type: ignore[attr-defined]
    return error


RAISED: dict[str, Callable[[], BaseException]] = {
    "ValueError": lambda: ValueError("boom"),
    "KeyError": lambda: KeyError("boom"),
    "StopIteration": StopIteration,
    "MemoryError": lambda: MemoryError("boom"),
    "OSError": lambda: FileNotFoundError(2, "boom", "path"),
    "UnicodeDecodeError": lambda: UnicodeDecodeError("utf-8", b"\xff", 0, 1, "boom"),
    "ExceptionGroup": lambda: ExceptionGroup("boom", [ValueError("one"), KeyError("two")]),
    "SystemExit": lambda: SystemExit(3),
    "KeyboardInterrupt": KeyboardInterrupt,
    "GeneratorExit": GeneratorExit,
    "NoException": NoException,
    "UnrebuildableError": lambda: UnrebuildableError("boom", other="more"),
    "with a lock": with_a_lock,
}

UNSENDABLE: dict[str, Callable[[], Any]] = {
    "a lock": threading.Lock,
    "a generator": lambda: (k for k in range(3)),
    "an open file": lambda: open(os.devnull),  # noqa: SIM115
    "a nested lock": lambda: {"x": [jnp.ones(3), threading.Lock()]},
}


def fails(function: Callable[..., Any], *args: Any) -> Callable[[int], str]:
    """Return a function that calls another worker and says how the failure is not as promised."""

    def attempt(peer: int) -> str:
        try:
            return f"no error, but {jd.rpc_sync(peer, function, args=args)!r:.100}"
        except BaseException as error:
            return "" if promised(function, args, error) else f"{type(error).__name__}: {error!r:.300}"

    return attempt


def promised(function: Callable[..., Any], args: tuple[Any, ...], error: BaseException) -> bool:
    """Return whether an error has the type that it had on the other worker, or names what cannot be sent."""
    if function is raise_one:
        kind = type(RAISED[args[0]]())
        return isinstance(error, kind) or (isinstance(error, jd.RemoteError) and kind.__name__ in str(error))
    if function is recurse:
        return isinstance(error, RecursionError)
    return isinstance(error, jd.EncodingError) and "cannot send the result" in str(error)


def never_returns(peer: int) -> str:
    try:
        jd.rpc_sync(peer, never, timeout=TIMEOUT)
    except jd.CallTimeoutError as error:
        return "" if "never" in str(error) else str(error)
    return "no timeout"


def play(chance: random.Random, count: int) -> Iterator[Outcome]:
    """Call a function that fails on the next worker; the next call must be right."""
    me = jd.init(timeout=30)
    attempts = {f"raises {name}": fails(raise_one, name) for name in RAISED}
    attempts |= {f"returns {name}": fails(unsendable, name) for name in UNSENDABLE}
    attempts |= {"recurses": fails(recurse), "never returns": never_returns}
    for _ in range(count):
        name, step = chance.choice(sorted(attempts)), chance.randrange(1, jd.world_size())
        peer = (me.rank + step) % jd.world_size()
        problem = attempts[name](peer)
        if jd.rpc_sync(peer, operator.add, args=(2, 3)) != 5:
            problem += "; the next call was wrong"
        yield judged(name, problem, named=True)
    jd.shutdown()
