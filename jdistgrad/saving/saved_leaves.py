"""Describe leaves in JSON, and rebuild them bit for bit.

The data of arrays are in other files; other leaves are in their descriptions.
"""

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jdistgrad._compat import weakly_typed
from jdistgrad.errors import CheckpointError
from jdistgrad.leaves import LeafSpec, check_kept, named_dtype as named_dtype, plain
from jdistgrad.rpc import trees
from jdistgrad.rpc.fingerprints import ALIKE

Description = dict[str, Any]

PLAIN: dict[str, tuple[Callable[[Any], Any], Callable[[Any], Any]]] = {  # how JSON holds it, and how it is read
    "bool": (bool, bool),
    "int": (int, int),
    "float": (float.hex, float.fromhex),
    "complex": (lambda z: [z.real.hex(), z.imag.hex()], lambda parts: complex(*map(float.fromhex, parts))),
    "str": (str, str),
    "bytes": (bytes.hex, bytes.fromhex),
}
NUMBERS = ("bool", "int", "float", "complex")
ARRAYS = ("jax", "weak", "numpy", "scalar")


def described(leaf: Any, where: str) -> Description:
    """Describe a leaf. Raises CheckpointError, with the place, for one that cannot be saved."""
    if isinstance(leaf, jax.core.Tracer):
        raise CheckpointError(f"{where} is a traced value: save outside jax.jit and jax.grad")
    if isinstance(leaf, jax.Array):
        if leaf.is_deleted():
            raise CheckpointError(f"{where} has been deleted, perhaps by a function that it was donated to")
        if not leaf.is_fully_addressable and not leaf.is_fully_replicated:
            raise CheckpointError(
                f"{where} is spread over several processes ({leaf.sharding}). Save the part that each holds, "
                "jd.per_worker(array.addressable_data(0))."
            )
        spec = LeafSpec.of(leaf)
        kind = "jax" if spec.impl is None else "key"
        return {"kind": "weak" if spec.weak else kind, "dtype": spec.impl or spec.dtype.name, "shape": list(spec.shape)}
    if isinstance(leaf, np.ndarray | np.generic):
        if leaf.dtype.kind not in "biufc" and not _is_extension(leaf.dtype):
            raise CheckpointError(f"{where} is {leaf.dtype}{list(leaf.shape)}, which cannot be saved: save numbers")
        kind = "numpy" if isinstance(leaf, np.ndarray) else "scalar"
        return {"kind": kind, "dtype": leaf.dtype.name, "shape": list(leaf.shape)}
    name = type(leaf).__name__
    if type(leaf).__module__ == "builtins" and name in PLAIN:
        return {"kind": name, "value": PLAIN[name][0](leaf)}
    if callable(leaf):
        return {"kind": "function"}
    raise CheckpointError(
        f"{where} is a {name}, which cannot be saved. Arrays, random keys, numbers, strings and references to trees of "
        "them can; functions stay as they are. Register the class as a pytree, or leave it out."
    )


def check_function(leaf: Any, where: str) -> None:
    """Raise CheckpointError for a callable object that holds arrays."""
    waiting, seen = [leaf], dict[int, Any]()
    while waiting:
        for one in trees.leaves_once(waiting.pop()):
            if isinstance(one, jax.Array | np.ndarray):
                raise CheckpointError(
                    f"{where} is a {type(leaf).__name__}, which can be called like a function but holds arrays, which "
                    "would not be saved. Register the class as a pytree, or leave it out."
                )
            is_users = type(one).__module__.partition(".")[0] not in ALIKE  # an object of a user's class
            if is_users and isinstance(getattr(one, "__dict__", None), dict) and id(one) not in seen:
                seen[id(one)] = one
                waiting.append(dict(vars(one)))


def data(leaf: Any) -> np.ndarray | None:
    """Return a leaf's data for the files; None if it has none."""
    leaf = plain(leaf)
    if not isinstance(leaf, jax.Array | np.ndarray | np.generic) or leaf.size == 0:
        return None
    host = np.asarray(leaf)
    if _is_extension(host.dtype) and host.dtype.name != "bfloat16":  # orbax cannot write all of them
        return np.ascontiguousarray(host).reshape(-1).view(np.uint8)
    return host


def rebuilt(description: Mapping[str, Any], stored: np.ndarray | None, like: Any) -> Any:
    """Return the saved leaf, on the devices of ``like``, the leaf that it replaces."""
    kind = description["kind"]
    if kind == "function":
        return like
    if kind in PLAIN:
        return PLAIN[kind][1](description["value"])
    shape = tuple(description["shape"])
    if kind == "key":
        implementation = description["dtype"]
        if stored is None:
            return _placed(jax.random.split(jax.random.key(0, impl=implementation), shape), like)
        return _placed(jax.random.wrap_key_data(jnp.array(stored), impl=implementation), like)
    found = host(named_dtype(description["dtype"]), shape, stored)
    if kind in ("numpy", "scalar"):
        return found if kind == "numpy" else found[()]
    array = _placed(found, like)
    check_kept(found.dtype, array.dtype)
    return weakly_typed(array) if kind == "weak" else array


def _placed(found: Any, like: Any) -> jax.Array:
    """Put an array on the devices of another one, committed to them if that one is."""
    if not isinstance(like, jax.Array) or not like.is_fully_addressable:
        return jnp.array(found)
    if like.committed:
        return jax.device_put(found, like.sharding)
    with jax.default_device(next(iter(like.sharding.device_set))):
        return jnp.array(found)


def host(dtype: np.dtype, shape: tuple[int, ...], stored: np.ndarray | None) -> np.ndarray:
    """Return the array with this data."""
    if stored is None:
        return np.zeros(shape, dtype)
    return np.array(stored if stored.dtype == dtype else stored.view(dtype).reshape(shape))


def _is_extension(dtype: np.dtype) -> bool:
    """Return whether a dtype is one that JAX adds to NumPy's."""
    return dtype.kind == "V" and dtype.names is None and dtype.name != "void" and hasattr(jnp, dtype.name)


def fits(saved: Description, expected: Description) -> bool:
    """Return whether a saved leaf may replace another. A number may replace a scalar array, and the reverse."""
    kinds = saved["kind"], expected["kind"]
    if any(kind in NUMBERS for kind in kinds):
        each = saved, expected
        return all(one["kind"] in NUMBERS or (one["kind"] in ARRAYS and not one["shape"]) for one in each)
    if all(kind in ARRAYS for kind in kinds):
        return bool(saved["dtype"] == expected["dtype"] and saved["shape"] == expected["shape"])
    same = kinds[0] == kinds[1]
    return same and all(saved.get(part) == expected.get(part) for part in ("dtype", "shape"))


def spelled(description: Mapping[str, Any]) -> str:
    kind = description["kind"]
    if "shape" not in description:
        return f"a {kind}"
    dtype = description["dtype"]
    return f"{f'key<{dtype}>' if kind == 'key' else dtype}{description['shape']}"
