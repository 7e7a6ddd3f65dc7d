"""Collectives over the devices of processes, by XLA (NCCL, ICI, gloo), after a meeting of the ranks over MPI."""

import concurrent.futures
import contextlib
import functools
import hashlib
import socket
import traceback
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeVar

import jax
import numpy as np

from jdistgrad import jaxprs
from jdistgrad._compat import trace_context
from jdistgrad.collectives import spanning
from jdistgrad.collectives.descriptions import enclosed, has_functions, on_opened, opened
from jdistgrad.collectives.host import TIMEOUT
from jdistgrad.collectives.host_arrays import any_traced
from jdistgrad.collectives.launches import end_job, launches
from jdistgrad.collectives.mesh import Mesh
from jdistgrad.collectives.mpi import MPI
from jdistgrad.collectives.spanning import Finish, Program, Span, at_home, default_device, in_one_order
from jdistgrad.errors import CollectiveError, DisagreementError
from jdistgrad.rpc.devices import cuda_uuid

T = TypeVar("T")


class Devices(MPI):
    """Collectives with processes as ranks, whose arrays stay on their devices.

    Each rank has one device: JAX's default device. The ranks meet over MPI before each program, so that a rank that is
    missing or does something else is named; then XLA reduces. ``jit`` compiles a function with its collectives into one
    program over all devices, as ``DataParallel`` does with its steps. Elsewhere inside ``jax.jit`` a program has this
    rank's device only, and collectives go through host memory.

    A rank may have several devices: a loss's arguments may be sharded over them, and replicated gradients are averaged.
    Other arrays must be on the rank's device.

    Arguments:
      comm: an mpi4py communicator; default ``MPI.COMM_WORLD``. ``jax.distributed`` must run in its ranks:
        ``jd.init(devices=True)``.
      timeout: seconds to wait for the slowest rank, now and later.

    Example:
      >>> dp = jd.DataParallel(jd.collectives.Devices())
    """

    span: Span
    device: jax.Device

    def __init__(self, comm: Any = None, *, timeout: float = TIMEOUT):
        super().__init__(comm, timeout=timeout)
        self.agree("new collectives over devices")
        device = default_device()
        places = self.gather_objects(_place_of(device))
        require_usable(places)
        by_id = {one.id: one for one in jax.devices(device.platform)}
        ids = [place.device for place in places]
        # Another axis name for each group: JAX caches traces by axis names.
        axis = f"jdistgrad_ranks_{hashlib.blake2b(repr(ids).encode(), digest_size=4).hexdigest()}"
        mesh = jax.sharding.Mesh(np.array([by_id[number] for number in ids]), (axis,))
        self.span, self.device, self.in_programs = Span(mesh, device), device, Mesh(axis)

    def __repr__(self) -> str:
        return f"Devices(rank={self._rank}, size={self.size}, device={self.span.device})"

    @property
    def rank(self) -> Any:
        """This rank; in a program over all devices a traced number."""
        return self.in_programs.rank if self.span is not None and self.span.is_traced else self._rank

    @rank.setter
    def rank(self, rank: int) -> None:
        self._rank = rank

    def perform(self, name: str, x: jax.Array, how: Any = None) -> jax.Array:
        return self.in_programs.perform(name, x, how) if self.span.is_traced else super().perform(name, x, how)

    def section(self, what: str) -> Any:
        return contextlib.nullcontext(self.in_programs) if self.span.is_traced else super().section(what)

    def program(self, closed: Any, like: Sequence[Any], finish: Finish, what: str) -> Program:
        return spanning.spanning_program(self.span, closed, like, functools.partial(finish, self.in_programs))

    def dispatch(
        self, program: Program, shared: Sequence[jax.Array], what: str, inputs: Sequence[Any], key: Any = None
    ) -> list[jax.Array]:
        self._compile(program, what, what if key is None else key)
        launch = launches.begin(what, self.engine.block(what, may_leave=True), inputs, self.timeout)
        try:
            results, launch.done = program.launch(shared)
        except BaseException as error:
            launches.give_up(launch)
            if self.size > 1:
                traceback.print_exc()
                end_job(launch, f"{what}: this rank failed, and the others wait for it: {error}")
            raise
        return results

    def _compile(self, program: Program, what: str, key: Any) -> None:
        """Compile a new program on all ranks. If that fails on one, all raise an error."""
        if key in self.span.compiled:
            program.compile()
            return
        try:
            program.compile()
        except Exception:
            self.gather_objects("failed")
            raise
        failed = [rank for rank, outcome in enumerate(self.gather_objects("")) if outcome]
        if failed:
            raise CollectiveError(f"{what} was not run: ranks {failed} could not compile it, see their errors")
        self.span.compiled.add(key)

    def _starter(self) -> Callable[[Callable[[Any], Any]], concurrent.futures.Future[Any]]:
        def start(operation: Callable[[Any], Any]) -> concurrent.futures.Future[Any]:
            future = concurrent.futures.Future[Any]()
            try:  # at once: devices run asynchronously
                future.set_result(operation(self))
            except Exception as error:
                future.set_exception(error)
            return future

        return start

    def jit(self, function: Callable[..., Any], *, donate_argnums: int | Sequence[int] = ()) -> Callable[..., Any]:
        donated = (donate_argnums,) if isinstance(donate_argnums, int) else tuple(donate_argnums)
        plain, enclosing = (_Jitted(self, one, donated) for one in (function, on_opened(function)))

        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            if any_traced((args, kwargs)):
                return function(*args, **kwargs)
            if not has_functions((args, kwargs)):
                return plain(args, kwargs)
            return opened(enclosing(*enclosed((args, kwargs))))

        return call


class _Jitted:
    """A function as programs over all devices, one for each type of its arguments."""

    def __init__(self, all_: Devices, function: Callable[..., Any], donate_argnums: Sequence[int]):
        self._all, self._function, self._donated = all_, function, donate_argnums
        self._found: dict[Any, tuple[Program, Any, str]] = {}

    def __call__(self, args: Any, kwargs: Any) -> Any:
        args, kwargs = jax.tree.map(lambda leaf: at_home(leaf, self._all.device), (args, kwargs))
        leaves, tree = jax.tree.flatten((args, kwargs))
        key = tree, trace_context(), tuple(map(jax.typeof, leaves))
        if key not in self._found:
            self._found[key] = self._make(args, kwargs)
        program, structure, what = self._found[key]
        shared = program.prepare(leaves)
        with in_one_order:
            try:
                self._all.agree(what)
            except DisagreementError as error:
                remedy = "If the function uses a number of the rank, such as jd.rank(), make it an argument."
                raise DisagreementError(f"{error} {remedy}", **vars(error)) from None
            results = self._all.dispatch(program, shared, what, leaves)
        return jax.tree.unflatten(structure, results)

    def _make(self, args: Any, kwargs: Any) -> tuple[Program, Any, str]:
        closed, results = spanning.traced(self._all.span, self._function, args, kwargs)
        leaves = jax.tree.leaves((args, kwargs))
        numbers = jax.tree.unflatten(jax.tree.structure(args), range(len(jax.tree.leaves(args))))
        donated = jax.tree.leaves([numbers[k] for k in self._donated])
        name = getattr(self._function, "__name__", "a function")
        shapes = ", ".join(jax.typeof(leaf).str_short() for leaf in leaves[:3])
        rest = f" and {len(leaves) - 3} more" if len(leaves) > 3 else ""
        what = f"{name} of {shapes}{rest} over all devices (program {jaxprs.digest(closed):016x})"
        return spanning.spanning_program(self._all.span, closed, leaves, list, donated), results, what


class UnusableDevicesError(CollectiveError):
    """XLA's collectives cannot span the devices of these ranks. All ranks raise it."""


class Place(NamedTuple):
    """A rank's device, for the others. ``processes``: of ``jax.distributed``; ``card``: the GPU's id, "" if unknown."""

    processes: int
    device: int
    platform: str
    kind: str
    host: str
    card: str

    def __str__(self) -> str:
        return f"{self.kind} ({self.platform}) on {self.host}"


def _place_of(device: jax.Device) -> Place:
    card = "" if device.platform == "cpu" else cuda_uuid(device.local_hardware_id or 0)
    return Place(jax.process_count(), device.id, device.platform, device.device_kind, socket.gethostname(), card)


def require_usable(places: Sequence[Place]) -> None:
    """Raise UnusableDevicesError unless XLA's collectives can span the ranks' devices."""
    alone = [rank for rank, place in enumerate(places) if place.processes < len(places)]
    if alone:
        raise UnusableDevicesError(
            f"Devices: ranks {alone} of {len(places)} see only their own devices, so XLA's collectives do not reach "
            "the others. Call jd.init(devices=True) on every rank before the first array, or start jax.distributed."
        )
    kinds = {(place.platform, place.kind): rank for rank, place in reversed(list(enumerate(places)))}
    if len(kinds) > 1:
        one, other = sorted(kinds.values())[:2]
        raise UnusableDevicesError(
            f"Devices: the ranks have different kinds of devices: rank {one} has {places[one]}, rank {other} has "
            f"{places[other]}. XLA's collectives need one kind: choose it with JAX_PLATFORMS, or leave nodes out."
        )
    owners: dict[tuple[str, str], int] = {}
    for rank, place in enumerate(places):
        owner = owners.setdefault((place.host, place.card), rank) if place.card else rank
        if owner != rank:
            raise UnusableDevicesError(
                f"Devices: ranks {owner} and {rank} share a GPU of {place.host} ({place.card}), which NCCL does not "
                "support. Give each rank a GPU (CUDA_VISIBLE_DEVICES, or as many ranks on a node as it has GPUs), or "
                "use collectives.MPI."
            )
