"""Programs that span the devices of all ranks, each of which passes its own arrays and gets its own results.

A rank's array is its block of rows of one global array, so no byte is copied. A scalar travels as an array of one row.
"""

import contextlib
import contextvars
import functools
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec, SingleDeviceSharding

from jdistgrad import jaxprs
from jdistgrad._compat import configured
from jdistgrad.errors import LeafError
from jdistgrad.leaves import LeafSpec, as_jax_array, is_key, plain

# From collectives, the results of a jaxpr, and arguments that the jaxpr does not have, to a list of results.
Finish = Callable[..., list[Any]]

NO_MESH = Mesh(np.empty((), object), ())  # for programs of this rank alone, whatever mesh the user has set

# Held from meeting to dispatch: all processes must dispatch programs that span them in the same order.
in_one_order = threading.RLock()

_traced: contextvars.ContextVar["Span | None"] = contextvars.ContextVar("jdistgrad_span", default=None)


class Span:
    """The devices of the ranks of a group, and this rank's among them."""

    def __init__(self, mesh: Mesh, device: jax.Device):
        self.mesh, self.size, self.device = mesh, mesh.size, device
        (self.axis,) = mesh.axis_names
        self.rows = PartitionSpec(self.axis)
        self.axes = [(self.axis, self.size)]  # ``jax.make_jaxpr``'s argument ``axis_env``
        self.compiled: set[Any] = set()  # keys of the programs that have been compiled, the same on all ranks
        self._sharding, self._here = NamedSharding(mesh, self.rows), SingleDeviceSharding(device)

    @contextlib.contextmanager
    def tracing(self) -> Iterator[None]:
        token = _traced.set(self)
        try:
            yield
        finally:
            _traced.reset(token)

    @property
    def is_traced(self) -> bool:
        """Whether this thread traces a program for the same devices."""
        found = _traced.get()
        return found is not None and (found is self or found.mesh == self.mesh)

    def shared(self, leaves: Sequence[Any]) -> list[jax.Array]:
        """Return global arrays in which this rank's leaves are its rows."""
        elsewhere = [k for k, x in enumerate(leaves) if not isinstance(x, jax.Array) or x.sharding != self._here]
        own = _changed(
            list(leaves), elsewhere, lambda xs: jax.device_put([at_home(x, self.device) for x in xs], self.device)
        )
        odd = [k for k, leaf in enumerate(own) if has_no_rows(LeafSpec.of(leaf)) or has_odd_layout(leaf)]
        make = jax.make_array_from_single_device_arrays
        rows = _changed(own, odd, _with_rows)
        return [make((x.shape[0] * self.size, *x.shape[1:]), self._sharding, [x]) for x in rows]


def default_device() -> jax.Device:
    chosen = configured("jax_default_device")
    return chosen if isinstance(chosen, jax.Device) else jax.local_devices(backend=chosen)[0]


def where_it_was(result: jax.Array, before: jax.Array) -> jax.Array:
    """Replicate a result over the rank's devices, if the argument was replicated and has the same shape."""
    replicated = len(before.devices()) > 1 and before.shape == result.shape
    return jax.device_put(result, before.sharding) if replicated else result


def at_home(leaf: Any, device: jax.Device) -> Any:
    """Return a leaf for programs of this rank: of a replicated array, the copy on the rank's device.

    Raises:
      LeafError: the array is sharded over devices, or is on another device or on a mesh of one.
    """
    if not isinstance(leaf, jax.Array) or isinstance(leaf, jax.core.Tracer):
        return leaf
    devices: set[Any] = leaf.sharding.device_set
    name = f"{leaf.dtype}{list(leaf.shape)}"
    if isinstance(leaf.sharding, SingleDeviceSharding):
        if device in devices or next(iter(devices)).platform != device.platform:
            return leaf
    elif not leaf.is_fully_addressable:
        raise LeafError(
            f"Devices: {name} is spread over the devices of several processes, expected this rank's own array. "
            "Use collectives.Mesh inside jax.shard_map for such arrays."
        )
    elif len(devices) > 1 and device in devices and leaf.is_fully_replicated:
        return next(shard.data for shard in leaf.addressable_shards if shard.device == device)
    number = jax.local_devices(backend=device.platform).index(device)
    raise LeafError(
        f"Devices: {name} lies on {leaf.sharding}, expected the rank's device, {device}, or copies on all devices of "
        f"the rank. Use jax.device_put(x, jax.local_devices()[{number}])."
    )


def has_odd_layout(array: Any) -> bool:
    """Return whether the layout is not the default. XLA compiles for layouts, and may order reductions by them."""
    if array.ndim < 2 or next(iter(array.devices())).platform == "tpu":  # TPUs have default layouts of their own
        return False
    layout = array.format.layout
    return layout is not None and layout.major_to_minor != tuple(range(array.ndim))


def has_no_rows(spec: LeafSpec) -> bool:
    """Return whether a value is converted: keys to their data, scalars to arrays, empty arrays to a placeholder."""
    return spec.impl is not None or not spec.shape or 0 in spec.shape


def to_rows(x: Any) -> jax.Array:
    data = plain(x if is_key(x) else jnp.asarray(x))
    if data.size == 0:
        return jnp.zeros(1, jnp.int8)
    return data if data.ndim else data.reshape(1)


def from_rows(spec: LeafSpec, x: jax.Array) -> Any:
    if 0 in spec.shape and spec.impl is None:
        return jnp.zeros(spec.shape, spec.dtype)
    if 0 in spec.shape:
        return jax.random.split(jax.random.key(0, impl=spec.impl), spec.shape)
    if spec.impl is not None:
        return spec.restored(x)
    return x if spec.shape else x.reshape(())


@jax.jit
def _with_rows(leaves: list[Any]) -> list[jax.Array]:
    return [jnp.copy(to_rows(leaf)) for leaf in leaves]  # a copy has the default layout


@functools.partial(jax.jit, static_argnames="specs")
def _without_rows(leaves: list[jax.Array], specs: tuple[LeafSpec, ...]) -> list[Any]:
    return [from_rows(spec, x) for spec, x in zip(specs, leaves, strict=True)]


def traced(span: Span, function: Callable[..., Any], args: Any, kwargs: Any) -> tuple[Any, Any]:
    """Return the jaxpr of a function with collectives of this rank's arguments, and the tree of its result."""
    leaves, tree = jax.tree.flatten((args, kwargs))
    found: list[Any] = []

    def flat(*leaves: Any) -> list[Any]:
        args, kwargs = jax.tree.unflatten(tree, leaves)
        results, structure = jax.tree.flatten(function(*args, **kwargs))
        found.append(structure)
        return results

    with span.tracing():
        return jax.make_jaxpr(flat, axis_env=span.axes)(*leaves), found[0]


class Program:
    """A compiled program that ends with reductions over all ranks, traced on first use and compiled once.

    Arguments:
      run: the jitted program. It returns results, and an array that is ready when the program has ended.
      arguments: converts this rank's leaves to the arguments of ``run``; ``own``: the results to this rank's.
      mesh: the program's mesh, whatever mesh the user has set.
      compiled_at_once: whether to compile the program when it is traced.
    """

    def __init__(
        self,
        run: Any,
        arguments: Callable[[Sequence[Any]], list[Any]],
        own: Callable[[Sequence[jax.Array]], list[jax.Array]],
        mesh: Mesh = NO_MESH,
        *,
        compiled_at_once: bool = False,
    ):
        self._run, self._arguments, self._own, self._mesh = run, arguments, own, mesh
        self._at_once, self._traced, self._lowered = compiled_at_once, False, None

    def prepare(self, leaves: Sequence[Any]) -> list[jax.Array]:
        """Return the arguments of ``launch``; trace the program on first use, which may raise errors of the user."""
        shared = self._arguments(leaves)
        if not self._traced:
            with jax.set_mesh(self._mesh):
                self._lowered = self._run.lower(*shared)
            self._traced = True
        if self._at_once:
            self.compile()
        return shared

    def compile(self) -> None:
        if self._lowered is not None:
            self._lowered.compile()
            self._lowered = None

    def forget(self) -> None:
        """Drop the lowered program: the ranks' programs differ, so it is not compiled."""
        self._lowered = None

    def launch(self, shared: Sequence[jax.Array]) -> tuple[list[jax.Array], jax.Array]:
        """Dispatch the program; return this rank's results, and an array that is ready when the program has ended."""
        with jax.set_mesh(self._mesh):
            results, done = self._run(*shared)
        return self._own(results), done


def spanning_program(
    span: Span, closed: Any, like: Sequence[Any], finish: Callable[..., list[Any]], donated: Sequence[int] = ()
) -> Program:
    """Return a function of this rank's arrays, compiled into one program with that of all other ranks.

    Arguments:
      closed: the jaxpr of a function of this rank's arrays, with ``lax`` collectives over the span's axis.
      finish: from the results of the jaxpr, and the arguments that it does not have, to a list of results.
      donated: the numbers of arguments whose memory may be used for results.
    """
    # Constants are arguments: they may differ from rank to rank. Copied, since the user's program may change them.
    constants = [as_jax_array(const) for const in closed.consts]
    shared_constants, taken = span.shared(constants), [LeafSpec.of(leaf) for leaf in (*constants, *like)]
    count, first, given = len(constants), len(closed.jaxpr.invars), list[LeafSpec]()

    def on_rows(*rows: jax.Array) -> tuple[list[jax.Array], jax.Array]:
        values = [from_rows(spec, x) for spec, x in zip(taken, rows, strict=True)]
        args, rest = values[count : count + first], values[count + first :]
        results = finish(jaxprs.evaluate(closed.jaxpr, values[:count], args), *rest)
        given[:] = map(LeafSpec.of, results)
        return list(map(to_rows, results)), jnp.zeros(1, jnp.int8)

    def arguments(leaves: Sequence[Any]) -> list[jax.Array]:
        return shared_constants + span.shared(leaves)

    def own(results: Sequence[jax.Array]) -> list[Any]:
        found: list[Any] = [x.addressable_data(0) for x in results]
        odd = [k for k, spec in enumerate(given) if has_no_rows(spec)]
        return _changed(found, odd, functools.partial(_without_rows, specs=tuple(given[k] for k in odd)))

    spread = jax.shard_map(on_rows, mesh=span.mesh, in_specs=span.rows, out_specs=span.rows, check_vma=False)
    run = jax.jit(spread, donate_argnums=tuple(count + place for place in donated))
    return Program(run, arguments, own, span.mesh)


def _changed(leaves: list[Any], places: Sequence[int], change: Callable[[list[Any]], list[Any]]) -> list[Any]:
    """Change the leaves at some places, by a program of this rank alone."""
    if places:
        with jax.set_mesh(NO_MESH):
            changed = change([leaves[k] for k in places])
        for k, leaf in zip(places, changed, strict=True):
            leaves[k] = leaf
    return leaves
