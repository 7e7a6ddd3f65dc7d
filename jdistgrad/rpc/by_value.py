"""Functions and classes that cannot be imported by name: sent by value, with cloudpickle.

Functions of the program itself (``__main__``) may differ from worker to worker. They travel by name and a checksum of
their code. A receiver that has no such function asks the sender, which sends the function by value from then on. The
same bytes become the same object in all calls, so JAX finds what it compiled for the function.
"""

import collections
import copyreg
import functools
import io
import pickle
import sys
import types
import weakref
import zlib
from typing import Any, ClassVar, Generic, TypeVar

import cloudpickle
import jax
import numpy as np

from jdistgrad._compat import static_arguments
from jdistgrad.errors import FunctionError
from jdistgrad.rpc.caller import Caller
from jdistgrad.rpc.claims import encoding
from jdistgrad.rpc.current import within
from jdistgrad.rpc.functions import JITTED, import_path, lookup, registered, registered_name, shown_as
from jdistgrad.rpc.mailbox import current_part, find_mailbox
from jdistgrad.rpc.traced_hook import EMPTY
from jdistgrad.wire import arrays, pinned
from jdistgrad.wire.arrays import ArrayBlock

T = TypeVar("T")

WITH_RULES: Any = jax.custom_vjp | jax.custom_jvp
CODE = types.FunctionType, type, JITTED, jax.custom_vjp, jax.custom_jvp
KEPT = 256  # functions that came by value: some KiB each, and what they hold
LARGEST = 1 << 20  # bytes: a function that closes over more is pickled and rebuilt in each call

Path = tuple[str, str]  # module and qualified name


class Cached(Generic[T]):
    """A value that is sent often and never changes, encoded once and decoded once.

    The value has the package's own classes, numbers and strings, but no functions or objects of users: these may
    change, or be redefined under the same name.
    """

    def __init__(self, value: T):
        self.value = value

    @functools.cached_property
    def stream(self) -> bytes:
        return pickle.dumps(self.value, protocol=5)

    def __reduce__(self) -> Any:
        return from_cache, (self.stream,)


@functools.lru_cache(maxsize=4096)
def from_cache(stream: bytes) -> Cached[Any]:
    """Return the value that arrived, decoded only if it has not been seen before."""
    return Cached(pickle.loads(stream))


OWN: set[type] = {ArrayBlock, Cached}  # classes that define ``__reduce__`` for messages

asked_for: set[tuple[Path, int]] = set()  # functions of the program that a worker did not have, with their likeness
_likenesses: "weakref.WeakKeyDictionary[Any, tuple[Any, int]]" = weakref.WeakKeyDictionary()  # as of some code
_sent: "weakref.WeakKeyDictionary[Any, tuple[Any, bytes | None]]" = weakref.WeakKeyDictionary()


class ObjectPickler(cloudpickle.Pickler):
    """Pickles values; functions and classes by name if the name leads back to them, else by value.

    Attributes:
      root: a function or class to pickle by value, although it has a name.
    """

    root: Any = None
    copies: pinned.Copies = pinned.NONE

    # cloudpickle would send what a file contains.
    dispatch_table: ClassVar[Any] = collections.ChainMap(
        {kind: reduce for kind, reduce in cloudpickle.Pickler.dispatch_table.items() if kind is not io.TextIOWrapper},
        copyreg.dispatch_table,
    )

    def reducer_override(self, value: Any) -> Any:
        name = registered_name(value)
        if name is not None:
            return registered, (name,)
        if not isinstance(value, CODE):
            return self.found(value)
        path = None if value is self.root else import_path(value)
        if path is None:
            return self.by_value(value)
        if path[0] != "__main__":
            return NotImplemented if isinstance(value, types.FunctionType | type) else (lookup, path)
        like, mailbox = likeness(value), find_mailbox()
        if mailbox is not None and (path, like) not in asked_for:
            return own_or_sent, (*path, like, None, mailbox.rank)
        code = code_of(value)
        return self.by_value(value) if code is None else (own_or_sent, (*path, like, code))

    def found(self, value: Any) -> Any:
        """Return how to pickle an object that is no function or class."""
        kind = type(value)
        if kind in OWN:
            return NotImplemented
        if kind is np.ndarray:
            return arrays.reduce_numpy(value)
        if isinstance(value, jax.Array):
            return arrays.reduce_jax(self.copies.of(value))
        if isinstance(value, np.memmap) or (isinstance(value, np.ndarray) and hasattr(value, "aval")):
            array = np.asarray(value)  # a constant of JAX that is not a jax.Array
            reduced = arrays.reduce_numpy(array)
            return (np.asarray, (array,)) if reduced is NotImplemented else reduced
        if isinstance(value, types.BuiltinFunctionType | types.MethodType):
            return NotImplemented
        path = import_path(value)  # jnp.add, for example
        return NotImplemented if path is None else (lookup, path)

    def by_value(self, value: Any) -> Any:
        """Return how to pickle a function or class from what it is made of."""
        if isinstance(value, JITTED):
            wrapped: Any = value
            numbers, names = static_arguments(value)
            jitted = functools.partial(jax.jit, static_argnums=numbers, static_argnames=names)
            return jitted, (wrapped.__wrapped__,)
        if isinstance(value, WITH_RULES):
            return object.__new__, (type(value),), vars(value)
        if isinstance(value, types.FunctionType) and (module := _module_with_file(value)):
            cells = [() if cell == EMPTY else (cell.cell_contents,) for cell in value.__closure__ or ()]
            names = value.__name__, value.__qualname__, value.__module__
            rest = value.__defaults__, value.__kwdefaults__, value.__dict__
            return make, (module, value.__code__, len(cells)), (cells, names, rest), None, None, complete
        return super().reducer_override(value)


def code_of(value: Any) -> bytes | None:
    """Return a function or class by value; None if it holds much, or what travels only in a call: a reference."""
    state = _state(value)
    if state is None:
        return _written(value)
    if value not in _sent or _sent[value][0] is not state:
        _sent[value] = state, _written(value)
    return _sent[value][1]


def _state(value: Any) -> Any:
    """Return what changes with the value's pickle; None if more than one object decides about that."""
    if isinstance(value, types.FunctionType):
        plain = not value.__closure__ and not value.__defaults__ and not value.__kwdefaults__ and not value.__dict__
        return value.__code__ if plain and _module_with_file(value) else None
    return None if isinstance(value, WITH_RULES) else type(value)  # rules may be replaced


def _written(value: Any) -> bytes | None:
    stream = io.BytesIO()
    try:
        with encoding(None):
            made = ObjectPickler(stream)
            made.root = value
            made.dump(value)
    except Exception:  # whatever the reason: the message itself says what cannot be sent
        return None
    return stream.getvalue() if stream.tell() <= LARGEST else None


@functools.lru_cache(maxsize=KEPT)
def from_code(code: bytes) -> Any:
    """Return what was sent by value: what came before by the same bytes, if it is still kept."""
    return pickle.loads(code)


def own_or_sent(module: str, qualname: str, like: int, code: bytes | None, rank: int = 0) -> Any:
    """Return this worker's own function or class of this name, if it is alike, or else that of the sender.

    Arguments:
      code: the sender's, by value; None if it is to be asked for it, by its ``rank``.
    """
    own = _own(module, qualname, like)
    if own is not None:
        return own
    if code is None:
        with within(None):
            code = current_part(Caller).rpc_sync(rank, code_of_own, (module, qualname, like), {}, None)
    return from_code(code)


def _own(module: str, qualname: str, like: int) -> Any:
    """Classes need not be alike: JAX's registry of pytrees and ``except`` clauses depend on the receiver's class."""
    try:
        own = lookup(module, qualname)
    except (ImportError, AttributeError):
        return None
    return own if isinstance(own, type) or likeness(own) == like else None


@shown_as("a question for the code of a function")
def code_of_own(module: str, qualname: str, like: int) -> bytes:
    """Return a function or class of this worker's program by value; send it by value from now on."""
    own = _own(module, qualname, like)
    code = None if own is None else code_of(own)
    if code is None:
        why = "it has been defined again since" if own is None else "what it holds cannot be sent, or is too large"
        raise FunctionError(
            f"another worker has no {module}.{qualname}, and it was not sent by value: {why}. Define it at the top "
            "level of a module or script that all workers have.",
            function=f"{module}.{qualname}",
        )
    asked_for.add(((module, qualname), like))
    return code


def likeness(value: Any) -> int:
    """Return a checksum of the code of a function, of the functions it wraps, and of its custom rules."""
    inner = getattr(value, "__wrapped__", value)  # of a jitted function, the function
    if not isinstance(inner, types.FunctionType) or inner.__dict__:
        return _likeness_of_all(value)
    state = inner.__code__, inner.__defaults__, inner.__kwdefaults__
    before, found = _likenesses.get(value, (None, 0))
    if before is None or any(one is not other for one, other in zip(before, state, strict=True)):
        found = _likeness_of_all(value)
        _likenesses[value] = state, found
    return found


def _likeness_of_all(value: Any) -> int:
    if isinstance(value, types.FunctionType) and not value.__dict__:
        return _likeness_of(value.__code__, repr((value.__defaults__, value.__kwdefaults__)))
    parts, left = list[Any](), [value]
    while left:
        one = left.pop()
        if isinstance(one, types.FunctionType | JITTED | WITH_RULES) and one not in parts:
            parts.append(one)
            left += vars(one).values()
    functions = [one for one in parts if isinstance(one, types.FunctionType)]
    return zlib.crc32(repr([_likeness_of(one.__code__, "") for one in functions]).encode())


@functools.lru_cache(maxsize=4096)
def _likeness_of(code: types.CodeType, defaults: str) -> int:
    plain = [one for one in code.co_consts if not isinstance(one, types.CodeType | frozenset)]
    inside = [_likeness_of(one, "") for one in code.co_consts if isinstance(one, types.CodeType)]
    text = repr((code.co_code, code.co_names, code.co_varnames, code.co_freevars, plain, inside, defaults))
    return zlib.crc32(text.encode(errors="replace"))


def _module_with_file(function: types.FunctionType) -> str | None:
    """Return the name of the module whose globals a function uses, if it can be imported elsewhere."""
    name = str(function.__globals__.get("__name__"))
    module = sys.modules.get(name)
    has_file = module is not None and getattr(module, "__file__", None) and vars(module) is function.__globals__
    return name if has_file and name != "__main__" else None


def make(module: str, code: types.CodeType, cells: int) -> types.FunctionType:
    """Return a function with empty cells: they may hold the function itself."""
    __import__(module)
    return types.FunctionType(code, vars(sys.modules[module]), closure=tuple(types.CellType() for _ in range(cells)))


def complete(function: types.FunctionType, state: Any) -> None:
    """Fill in what a function closed over, its defaults and its attributes."""
    cells, names, (defaults, keyword_defaults, attributes) = state
    for cell, contents in zip(function.__closure__ or (), cells, strict=True):
        if contents:
            (cell.cell_contents,) = contents
    function.__name__, function.__qualname__, function.__module__ = names
    function.__defaults__, function.__kwdefaults__ = defaults, keyword_defaults
    function.__dict__.update(attributes)
