"""How values travel between processes: pickle protocol 5, arrays out of band, functions by name, references split."""

import functools
import io
import pickle
import threading
import types
from collections.abc import Iterator
from typing import Any, Generic, TypeVar

import cloudpickle
import jax
import numpy as np

from jdistgrad.errors import DistgradError, EncodingError, FunctionError
from jdistgrad.rpc import functions
from jdistgrad.rpc.claims import Claim, ClaimTable
from jdistgrad.rpc.weights import Weight
from jdistgrad.wire import arrays
from jdistgrad.wire.frames import is_bulk
from jdistgrad.wire.message import Parcel

T = TypeVar("T")

JITTED = type(jax.jit(lambda: None))

_encoding = threading.local()  # the shipment of the value that this thread is encoding
_decoding = threading.local()  # the references that came with the value that this thread is decoding


class Shipment:
    """The references in one message: what each of them gives away travels beside the pickle stream.

    A receiver takes it over before it decodes anything, so that nothing is lost of what it cannot decode, or never
    asks for.
    """

    def __init__(self) -> None:
        self.given: list[tuple[Claim, Weight]] = []

    def add(self, claim: Claim) -> int:
        self.given.append((claim, claim.split()))
        return len(self.given) - 1

    def take_back(self) -> None:
        for claim, weight in self.given:
            claim.add(weight)

    def attachment(self) -> bytes:
        return pickle.dumps([(c.id, c.owner, w.units, w.scale) for c, w in self.given]) if self.given else b""


def ship(claim: Claim) -> int:
    """Called while a value is being encoded: give a share of a reference away. Its number in the shipment.

    Raises EncodingError outside an encoding: a reference has no meaning in an ordinary pickle.
    """
    shipment = getattr(_encoding, "shipment", None)
    if shipment is None:
        raise EncodingError(
            "a remote reference can only travel inside a call of jdistgrad: pickled by itself nobody would know of "
            "the copy. Send it as an argument or a result, or save rref.to_here() instead."
        )
    return shipment.add(claim)


def arrived(number: int) -> Claim:
    """Called while a value is being decoded: the claim that came as this number of its shipment."""
    return _decoding.claims[number]


class encoding:  # noqa: N801 used like a function
    """A block in which references that this thread pickles join a shipment; None: they are refused."""

    __slots__ = ("_outer", "_shipment")

    def __init__(self, shipment: Shipment | None):
        self._shipment = shipment

    def __enter__(self) -> None:
        self._outer = getattr(_encoding, "shipment", None)
        _encoding.shipment = self._shipment

    def __exit__(self, *error: object) -> None:
        _encoding.shipment = self._outer


class Frozen(Generic[T]):
    """A value that is sent often and never changes, without references: encoded once, and decoded once."""

    def __init__(self, value: T):
        self.value = value
        self._streams: dict[type, bytes] = {}

    def stream(self, pickler: Any) -> bytes:
        """Its encoding by picklers of this one's kind, which is told of a function that cannot be encoded."""
        kind = type(pickler)
        if kind not in self._streams:
            stream = io.BytesIO()
            inner = kind(stream, protocol=5)
            try:
                with encoding(None):
                    inner.dump(self.value)
            except BaseException:
                pickler.last_function = inner.last_function
                raise
            self._streams[kind] = stream.getvalue()
        return self._streams[kind]


def thawed(stream: bytes) -> Frozen:
    """What arrived, decoded if it has not been seen before."""
    return _thawed(stream, functions.registrations())


@functools.lru_cache(maxsize=4096)
def _thawed(stream: bytes, registrations: int) -> Frozen:
    return Frozen(pickle.loads(stream))


class _Reducing:
    """The rules both picklers share."""

    last_function: Any = None

    def reduction(self, value: Any) -> Any:
        kind = type(value)
        if kind is np.ndarray:
            return arrays.reduce_numpy(value)
        if kind is Frozen:
            return thawed, (value.stream(self),)
        name = functions.registered_name(value)
        if name is not None:
            return functions.registered, (name,)
        if kind is types.FunctionType:
            return self.plain_function(value)
        if isinstance(value, jax.Array):
            return arrays.reduce_jax(value)
        if isinstance(value, np.ndarray) and hasattr(value, "aval"):
            return arrays.reduce_numpy(np.asarray(value))  # a constant of JAX's, which is no jax.Array
        if isinstance(value, type | types.BuiltinFunctionType):
            return NotImplemented
        path = functions.import_path(value)  # jitted functions, jnp.add, custom_vjp functions ...
        if path is not None:
            return functions.by_name, path
        return self.jitted_code(value) if kind is JITTED else NotImplemented

    def plain_function(self, function: Any) -> Any:
        self.last_function = function
        return NotImplemented  # pickle writes the name in C, and checks that it leads back here

    def jitted_code(self, function: Any) -> Any:
        raise functions.refuse(function)


class NamePickler(_Reducing, pickle.Pickler):
    """Functions travel by name only."""

    def reducer_override(self, value: Any) -> Any:
        return self.reduction(value)


class CodePickler(_Reducing, cloudpickle.Pickler):
    """Functions that nobody can import travel by value."""

    def reducer_override(self, value: Any) -> Any:
        reduced = self.reduction(value)
        return super().reducer_override(value) if reduced is NotImplemented else reduced

    def plain_function(self, function: Any) -> Any:
        return super(_Reducing, self).reducer_override(function)

    def jitted_code(self, function: Any) -> Any:
        return jax.jit, (function.__wrapped__,)


class Codec:
    """Encodes for one world. ``allow_code`` says whether code may travel by value."""

    def __init__(self, *, allow_code: bool):
        self._pickler = CodePickler if allow_code else NamePickler

    def encode(self, value: Any, *, snapshot: bool) -> Parcel:
        stream, buffers, shipment = io.BytesIO(), list[pickle.PickleBuffer](), Shipment()
        pickler = self._pickler(stream, protocol=5, buffer_callback=buffers.append)
        try:
            with encoding(shipment):
                pickler.dump(value)
            raw = [_steady(buffer.raw()) if snapshot else buffer.raw() for buffer in buffers]
        except BaseException as error:
            shipment.take_back()
            explained = self._explained(error, pickler.last_function, value)
            if explained is error:
                raise
            raise explained from error
        return Parcel(stream.getbuffer(), raw, shipment.attachment(), shipment.take_back)

    def _explained(self, error: BaseException, function: Any, value: Any) -> BaseException:
        """What the user shall see: which function, or which part of the value, and what is wrong with it."""
        if isinstance(error, DistgradError) or not isinstance(error, Exception):
            return error
        if function is not None and functions.import_path(function) is None:
            return functions.refuse(function)
        return EncodingError(f"{self._culprit(value)}{type(error).__name__}: {error}")

    def _culprit(self, value: Any) -> str:
        """The path of the first leaf that cannot be encoded by itself."""
        try:
            leaves = jax.tree_util.tree_leaves_with_path(value, is_leaf=lambda node: isinstance(node, Iterator))
        except (TypeError, ValueError):  # a dict whose keys cannot be sorted
            return ""
        for path, leaf in leaves:
            try:
                self._pickler(io.BytesIO(), protocol=5, buffer_callback=lambda buffer: None).dump(leaf)
            except Exception:  # any reason will do: the first error has been kept
                return f"at {jax.tree_util.keystr(path)}, a {type(leaf).__name__}: " if path else ""
        return ""

    def decode(self, parcel: Parcel) -> Any:
        outer, _decoding.claims = getattr(_decoding, "claims", None), parcel.attached
        try:
            return pickle.loads(parcel.stream, buffers=parcel.buffers)
        except DistgradError:
            raise
        except (AttributeError, ImportError) as error:
            raise FunctionError(
                f"a message names something this worker does not have: {error}. Every worker must run the same "
                "version of every module."
            ) from error
        except Exception as error:
            raise EncodingError(f"a message could not be rebuilt: {type(error).__name__}: {error}") from error
        finally:
            _decoding.claims = outer


def hides_traced(value: Any) -> bool:
    """Whether something JAX traces is inside an object that JAX cannot look into."""
    try:
        with encoding(None):
            NamePickler(io.BytesIO(), protocol=5, buffer_callback=lambda buffer: None).dump(value)
    except EncodingError as error:
        return str(error) == arrays.TRACED
    except Exception:  # what cannot be pickled is not looked into
        return False
    return False


def claims_of(parcel: Parcel, table: ClaimTable) -> list[Claim]:
    """Take over the references of a message that has arrived."""
    if not parcel.attached:
        return []
    arrivals = pickle.loads(parcel.attached)
    return [table.add(identifier, owner, Weight(units, scale)) for identifier, owner, units, scale in arrivals]


def _steady(buffer: memoryview) -> memoryview:
    """Bytes that nobody changes while they wait to be sent. Small ones are copied into the frame anyway."""
    return buffer if buffer.readonly or not is_bulk(buffer.nbytes) else memoryview(bytearray(buffer))
