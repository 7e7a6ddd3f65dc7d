"""Collectives over an MPI communicator: mpi4py on host memory; mpi4jax, where it is installed, inside jit."""

import contextlib
import functools
import socket
from collections.abc import Iterator, Sequence
from typing import Any, Self

import jax
import jax.numpy as jnp
from jax.experimental import io_callback

from jdistgrad.collectives import by_mpi4jax, world
from jdistgrad.collectives.by_mpi4jax import MET
from jdistgrad.collectives.engines import OverMPI
from jdistgrad.collectives.host import TIMEOUT, HostCollectives
from jdistgrad.collectives.operations import described
from jdistgrad.collectives.send_recv import Peer
from jdistgrad.collectives.spanning import Finish, Program, Span, at_home, default_device, in_one_order, where_it_was
from jdistgrad.collectives.world import FOR_ANY_WORLD
from jdistgrad.errors import CollectiveError
from jdistgrad.ffi.lowering import call_in_order, on_cpus
from jdistgrad.rpc.meetings import Members
from jdistgrad.rpc.watchdog import WatchedBlock
from jdistgrad.rpc.worker import current_worker
from jdistgrad.threads import usable_cores


class MPI(HostCollectives):
    """Collectives over a duplicate of an MPI communicator. Every rank of the communicator must create one.

    On CPUs where mpi4jax is installed, compiled programs reduce through mpi4jax, without calling Python.

    Arguments:
      comm: an mpi4py communicator; default ``MPI.COMM_WORLD``, which raises where the workers are threads.
      on_device: reduce arrays in their devices' memory, by mpi4jax in compiled programs, also in steps of
        ``DataParallel`` and in operations called from Python. On GPUs this needs an MPI that takes device pointers,
        which is tried in a separate process. Otherwise arrays of GPUs go through pinned host memory.
      timeout: seconds to wait for the slowest rank, now and later.
    """

    device: jax.Device | None = None  # that arrays are reduced on; None: in host memory
    span: Span | None = None  # of the devices that programs span; None: programs are of one rank
    inside: WatchedBlock | None = None  # of the section that a compiled program is in
    engine: OverMPI
    _met: Any = None  # in a section of a program that is not for CPUs: a flag that depends on the meeting

    def __init__(self, comm: Any = None, *, on_device: bool = False, timeout: float = TIMEOUT):
        whole = _checked(comm)
        from mpi4py import MPI as mpi  # noqa: N811

        self.rank, self.size, self.timeout = whole.rank, whole.size, timeout
        ranks = mpi.Group.Translate_ranks(whole.group, range(self.size), mpi.COMM_WORLD.group)
        members = Members(current_worker(), ranks)
        self.engine = OverMPI(world.duplicate(whole, members, timeout), members)
        self._programs: dict[Any, Program] = {}
        host = socket.gethostname()
        cores = [its for where, its in self.gather_objects((host, usable_cores())) if where == host]
        self.has_room = world.has_room(cores, self.size)
        self._by_mpi4jax = on_device or (type(self) is MPI and on_cpus() and by_mpi4jax.has_mpi4jax())
        self._of_programs = self._over(self.engine.again(timeout))
        if on_device:
            self.device = default_device()
            self.agree("new collectives over MPI on devices")
            for rank, reason in enumerate(self.gather_objects(by_mpi4jax.refusal())):
                if reason:
                    remedy = "Without on_device=True gradients go through host memory."
                    raise CollectiveError(f"MPI(on_device=True): rank {rank}: {reason} {remedy}")

    def __repr__(self) -> str:
        return f"MPI(rank={self.rank}, size={self.size}{'' if self.device is None else ', on_device=True'})"

    def twin(self) -> Self:
        other = super().twin()
        other._of_programs = other._over(other.engine.again(self.timeout))
        return other

    def _over(self, engine: Any) -> Self:
        return super()._over(engine).adjusted(inside=None, _programs={})

    # Inside jit, by mpi4jax where it is installed.

    def perform(self, name: str, x: jax.Array, how: Any = None) -> jax.Array:
        if self._met is None:
            return super().perform(name, x, how)
        # The flag belongs to the section's trace; the operation may be traced in another.
        return self.adjusted(_met=None).perform(name, self._after_meeting(x), how)

    def _after_meeting(self, x: jax.Array) -> jax.Array:
        return x if self._met is None else jnp.where(self._met, x, jnp.zeros_like(x))

    def compiled(self, name: str, x: jax.Array, how: Any) -> jax.Array:
        if not self._by_mpi4jax:
            return super().compiled(name, x, how)
        return by_mpi4jax.performed(self._of_programs, name, self._after_meeting(x), how)

    def effect(self) -> Any:
        return by_mpi4jax.in_order() if self._by_mpi4jax else super().effect()

    @contextlib.contextmanager
    def section(self, what: str) -> Iterator[HostCollectives]:
        if not self._by_mpi4jax or not self.meets_in_programs or self.size == 1:
            with super().section(what) as inside:
                yield inside
            return
        quiet, channel, timeout = self.adjusted(meets_in_programs=False), self._of_programs, self.timeout
        if not on_cpus():  # operations of the section depend on the flag, so they wait for the agreement
            quiet._met = io_callback(lambda: by_mpi4jax.meet(channel, what, timeout), MET, ordered=True)
            yield quiet
            return
        enter = functools.partial(by_mpi4jax.enter, channel, what, timeout)
        call_in_order(enter, (), effect=self.effect(), quick=True)
        yield quiet
        call_in_order(functools.partial(by_mpi4jax.leave, channel), (), effect=self.effect(), quick=True)

    # On the ranks' devices.

    def eager(self, name: str, x: jax.Array, how: Any = None) -> jax.Array:
        if self.device is None or isinstance(how, Peer):
            return super().eager(name, x, how)
        x, before = at_home(x, self.device), x
        what, key = described(name, x, how), (name, how, jax.typeof(x))
        if key not in self._programs:
            closed, finish = jax.make_jaxpr(lambda x: x)(x), lambda all_, found: [all_.perform(name, found[0], how)]
            self._programs[key] = self.program(closed, [x], finish, what)
        shared = self._programs[key].prepare([x])
        with in_one_order:
            self.agree(what)
            return where_it_was(self.dispatch(self._programs[key], shared, what, [x])[0], before)

    def program(self, closed: Any, like: Sequence[Any], finish: Finish, what: str) -> Program:
        """Return a program of a jaxpr, whose results ``finish`` reduces."""
        return by_mpi4jax.rank_program(self, closed, finish, what)

    def dispatch(
        self, program: Program, shared: Sequence[jax.Array], what: str, inputs: Sequence[Any], key: Any = None
    ) -> list[jax.Array]:
        """Run a program that all ranks have agreed on; return its results for this rank.

        ``shared``: the program's arguments, made of ``inputs``. ``key``: equal on all ranks, and for equal programs
        only; default ``what``.
        """
        return program.launch(shared)[0]


def _checked(comm: Any) -> Any:
    """Return the communicator for new collectives. Raises CollectiveError if there is none."""
    try:
        from mpi4py import MPI as mpi  # noqa: N811
    except ImportError as error:
        raise CollectiveError(
            f"MPI: {error}. Collectives over MPI need mpi4py (pip install 'jdistgrad[mpi]') and an MPI; workers as "
            "threads need neither (jdistgrad.collectives.Local)."
        ) from error
    worker = current_worker()
    if comm is None and mpi.COMM_WORLD.size == 1 and worker.shares_process:
        raise CollectiveError(
            f"collectives of processes, made by {worker.info}: the {worker.size} workers of this world are threads of "
            f"one process, so each of them would reduce alone. {FOR_ANY_WORLD}"
        )
    whole: Any = mpi.COMM_WORLD if comm is None else comm
    if not isinstance(whole, mpi.Comm) or whole == mpi.COMM_NULL or whole.Is_inter():
        raise CollectiveError(
            f"MPI: comm must be an intracommunicator this rank belongs to, not {comm!r}. Ranks outside a group "
            "(MPI.COMM_NULL) take no part in its collectives."
        )
    return whole
