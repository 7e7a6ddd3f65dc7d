"""Groups of processes or threads that agree on each operation and reduce in host memory; groups of threads."""

import collections
import concurrent.futures
import contextlib
import copy
import functools
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Self, TypeVar, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import io_callback

from jdistgrad._compat import settings_of_results
from jdistgrad.collectives.base import Collectives
from jdistgrad.collectives.engines import OverMPI, Threads
from jdistgrad.collectives.host_arrays import copied, like
from jdistgrad.collectives.operations import OPERATIONS, collective_p, described
from jdistgrad.collectives.roll_call import agree, undivided
from jdistgrad.collectives.send_recv import Peer
from jdistgrad.collectives.world import FOR_ANY_WORLD, is_local, raise_if_lost
from jdistgrad.errors import CollectiveError, DisagreementError, WorkerLostError
from jdistgrad.ffi.dispatch import finish_programs
from jdistgrad.ffi.lowering import call_in_order, on_cpus
from jdistgrad.rpc import trees
from jdistgrad.rpc.meetings import Members
from jdistgrad.rpc.traced_hook import staging
from jdistgrad.rpc.worker import Worker, current_worker
from jdistgrad.wire.arrays import bytes_of
from jdistgrad.wire.interrupts import InterruptibleFuture, put_off_interrupt

T = TypeVar("T")

TIMEOUT = 300.0
SENDS_NOTHING = (
    "For each recv, and each derivative of a send, the other rank has to send: what it received must depend on what it "
    "differentiates (recv's after=), and the results of send and recv must be part of the losses."
)


class InTurn:
    """A queue of functions, which a thread of the worker's pool runs as long as there are any.

    A function runs with the JAX settings of the thread that submits it.
    """

    def __init__(self) -> None:
        self._tasks = collections.deque[Callable[[], None]]()
        self._lock, self._runs = threading.Lock(), False
        self._latest: Callable[[], concurrent.futures.Future[Any] | None] = lambda: None

    def submit(self, function: Callable[..., Any], *args: Any) -> concurrent.futures.Future[Any]:
        worker, future, (x64, precision, device) = current_worker(), InterruptibleFuture[Any](), settings_of_results()
        future.set_running_or_notify_cancel()  # not to be cancelled: the other ranks run the function too

        def run() -> None:
            try:
                with jax.enable_x64(x64), jax.default_matmul_precision(precision), jax.default_device(device):
                    future.set_result(function(*args))
            except BaseException as error:
                future.set_exception(error)

        with put_off_interrupt():  # else the task might get no thread
            with self._lock:
                self._tasks.append(run)
                begins, self._runs = not self._runs, True
            if begins:
                worker.run(self._run)
        self._latest = weakref.ref(future)  # the result may be large
        return future

    def run(self, function: Callable[..., Any], *args: Any) -> Any:
        return self.submit(function, *args).result()

    def finish(self) -> None:
        """Wait until all submitted functions have run."""
        latest = self._latest()
        if latest is not None:
            latest.exception()

    def _run(self) -> None:
        while True:
            with self._lock:
                self._runs = bool(self._tasks)
                if not self._runs:
                    return
                task = self._tasks.popleft()
            task()
            del task


class HostCollectives(Collectives):
    """Collectives on host memory, which Python can also call on concrete arrays.

    A group that survives may go on without dead ranks, once its ranks have voted (``survivors``: such groups have
    ``vote``, ``has_lost_after``, ``without_lost`` and ``explain``).
    """

    engine: OverMPI | Threads
    timeout: float = TIMEOUT
    meets_in_programs: bool = True  # whether ranks meet before the operations of compiled programs
    refusal: CollectiveError | None = None  # the error of further use, once the group is closed
    survives: bool = False
    voting: bool = False  # whether the ranks vote on an MPI error now
    _start: Any = None  # starts operations beside the program
    _closed: bool = False
    _of_programs: Any = None  # the group over the channel of compiled programs, if they have one

    @property
    def members(self) -> Members:
        return self.engine.members

    @property
    def world_ranks(self) -> tuple[int, ...]:  # type: ignore[override]
        return self.members.ranks

    def keeper(self) -> Worker:
        """Return the group's worker. Raises its world's error, or WorldClosedError, once that has failed or closed."""
        return cast("Worker", self.members.worker)

    def perform(self, name: str, x: jax.Array, how: Any = None) -> jax.Array:
        return collective_p.bind(x, by=self, name=name, how=how)

    # On concrete arrays, after an agreement: a mistake would give wrong sums.

    def eager(self, name: str, x: jax.Array, how: Any = None) -> jax.Array:
        if isinstance(how, Peer):
            finish_programs()  # whose messages come first
            memory = self.on_host(name, x, how)
        else:
            text = described(name, x, how)
            with undivided(self, text):
                self.agree(text)
                memory = self.on_host(name, x, how)
        recut = memory.shape != x.shape and len(x.devices()) > 1  # the sharding of x may not fit the result
        return jnp.asarray(memory) if recut or name == "send" else like(memory, x)

    def on_host(self, name: str, x: Any, how: Any) -> np.ndarray:
        """Apply an operation to a concrete array, in new memory."""
        if isinstance(how, Peer):
            return _carried(self, name, np.asarray(x), how)
        memory = copied(x) if OPERATIONS[name].overwrites else np.ascontiguousarray(x).reshape(np.shape(x))
        return self.run(name, memory, how)

    def run(self, name: str, memory: np.ndarray, how: Any = None) -> np.ndarray:
        """Run an operation that all ranks have agreed on, on contiguous memory, which some operations overwrite."""
        return self.engine.run(name, memory, how, self.timeout)

    # Objects, and the group.

    def allgather_object(self, value: Any) -> list[Any]:
        """Return the picklable objects of all ranks, by rank. Every rank must call it."""
        return self._gathered("a gather of objects", value)

    def broadcast_object(self, value: Any, root: int = 0) -> Any:
        """Return the root's picklable object. Every rank must call it; the others' values are ignored."""
        root = self._checked_root(root)
        return self._gathered(f"a broadcast of an object from rank {root}", value if self.rank == root else None)[root]

    def _gathered(self, text: str, value: Any) -> list[Any]:
        own = trees.steady(value)
        with undivided(self, text):
            self.agree(text)
            return [trees.steady(one) for one in self.gather_objects(own)]

    def gather_objects(self, value: Any) -> list[Any]:
        """Return the values of all ranks, by rank. Every rank must call it."""
        return self.members.begin(value, "a gather of objects").wait(self.timeout)

    def barrier(self) -> None:
        """Return when every rank has called ``barrier``."""
        self.agree("a barrier")

    def start(self, operation: Callable[["HostCollectives"], T]) -> concurrent.futures.Future[T]:
        """Start an operation beside the program; return a future of its result.

        Every rank must start the same operations in the same order. They run one after another, on a separate thread
        and channel, which the first start creates on all ranks. NumPy arrays that the operation reads must not change
        before its result is there.

        Example:
          >>> everybody = jd.collectives.of_this_world()
          >>> handle = everybody.start(lambda c: c.allreduce(jnp.ones(3)))
          >>> total = handle.result()
        """
        if self._start is None:
            self.agree("the first start of an operation beside the program")
            self._start = self._starter()
        return cast("concurrent.futures.Future[T]", self._start(operation))

    def _starter(self) -> Callable[[Callable[[Any], Any]], concurrent.futures.Future[Any]]:
        turns, twin = InTurn(), self.twin()
        return lambda operation: turns.submit(operation, twin)

    def close(self) -> None:
        """Free the group's channels; further use raises CollectiveError. Every rank must call it."""
        if self._closed:
            return
        jax.effects_barrier()  # programs that were dispatched may still need the channels
        self.agree("the end of these collectives")
        self._closed = True
        if self._start is not None:
            self._start(lambda twin: twin.close()).result()
        self.engine.free()
        if self._of_programs is not None:
            self._of_programs.engine.free()
        self.refusal = CollectiveError(f"{self!r} has been closed. Create new collectives.")
        (self._of_programs or self).refusal = self.refusal

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: Any, *error: object) -> None:
        if kind is None:  # after an error other ranks may not come to an agreement
            self.close()

    def _of_all(self, mine: Any, remedy: str) -> list[Any]:
        return super()._of_all(mine, remedy) if staging() else self.allgather_object(mine)

    def agree(self, text: str) -> None:
        """Raise DisagreementError on every rank unless all announce the same text. Every rank must call it."""
        agree(self, text, self.timeout)

    # In compiled programs, where the ranks agree once, at the beginning of a section.

    @contextlib.contextmanager
    def section(self, what: str) -> Iterator["HostCollectives"]:
        """Trace a block of operations that the ranks agree on once; yield collectives that do not agree again."""
        if not self.meets_in_programs or self.size == 1:
            yield self
            return
        meet = functools.partial(agree, self._of_programs or self, f"compiled {what}", self.timeout)
        if on_cpus():
            call_in_order(meet, (), effect=self.effect())
        else:
            io_callback(meet, None, ordered=True)
        yield self.adjusted(meets_in_programs=False)

    def adjusted(self, **settings: Any) -> Self:
        """Return a copy of the group with other settings, over the same channels."""
        other = copy.copy(self)
        vars(other).update(settings)
        return other

    def traced(self, name: str, x: jax.Array, how: Any = None) -> jax.Array:
        """Apply an operation to a tracer."""
        if isinstance(how, Peer):
            return HostCollectives.compiled(self, name, x, how)
        with self.section(described(name, x, how)) as all_:
            return all_.compiled(name, x, how)

    def twin(self) -> Self:
        """Return the same group over a new channel. Every rank must call it."""
        if self.refusal is not None:
            raise self.refusal
        return self._over(self.engine.again(self.timeout))

    def _over(self, engine: OverMPI | Threads) -> Self:
        return self.adjusted(engine=engine, refusal=None, _start=None)

    def place_of(self, rank: int) -> int:
        """Convert a rank of the original group to one of the group of survivors."""
        return rank

    def rank_at(self, place: int) -> int:
        """Convert a rank of the group of survivors to one of the original group."""
        return place

    # Inside jit, where programs call Python for each operation.

    def compiled(self, name: str, x: jax.Array, how: Any) -> jax.Array:
        """Apply an operation to a tracer, inside a section."""
        result = jax.ShapeDtypeStruct(x.shape, x.dtype)
        if name == "send":
            result = jax.ShapeDtypeStruct((), np.float32)
        elif name in OPERATIONS:
            result = jax.ShapeDtypeStruct(OPERATIONS[name].shape(x.shape, self.size), x.dtype)
        channel = self if isinstance(how, Peer) else self._of_programs or self
        if not on_cpus():
            return io_callback(lambda x: channel.on_host(name, x, how), result, x, ordered=True)
        (made,) = call_in_order(lambda x: [channel.on_host(name, x, how)], [result], x, effect=self.effect())
        return made

    def effect(self) -> Any:
        """Return the ordered effect of operations in programs."""
        return in_order()


def _carried(all_: Any, name: str, x: np.ndarray, peer: Peer) -> np.ndarray:
    """Send an array; or return the next array from a rank, which must have the same description.

    Raises:
      MissingRanksError: no array has come in time.
      DisagreementError: the array, which is dropped, has another description.
      WorkerLostError: the sender is lost.
    """
    if all_.refusal is not None:
        raise all_.refusal
    all_.keeper()
    words = f"{'cotangent of ' * peer.order}{x.dtype}{list(x.shape)}"
    if name == "send":
        try:
            all_.members.send(peer.rank, peer.tag, (words, np.frombuffer(bytes_of(x), np.uint8)))
        except WorkerLostError as error:
            raise_if_lost([all_.world_ranks[peer.rank]], f"send to {peer}", error)
            raise
        return np.zeros((), np.float32)
    octets: np.ndarray
    sent, octets = all_.members.receive(peer.rank, peer.tag, f"recv from {peer}", all_.timeout, SENDS_NOTHING)
    if sent != words:
        raise DisagreementError(
            f"recv from {peer}: expected {words}, but rank {peer.rank} sent {sent}. recv(like, ...) takes arrays, "
            "or jax.ShapeDtypeStruct, of the shapes and dtypes that are sent, in the same order. If one rank "
            "differentiates, the other must too.",
            rank=peer.rank,
        )
    return octets.view(x.dtype).reshape(x.shape)


class Local(HostCollectives):
    """Collectives with workers of the current local world as ranks.

    Every worker must create its ``Local`` objects in the same order: the k-th of each belong together.

    Arguments:
      workers: the world ranks of the participants; default all.
    """

    def __init__(self, workers: Sequence[int] | None = None) -> None:
        worker = current_worker()
        if not is_local(worker):
            raise CollectiveError(
                f"collectives of threads, created by {worker.info}: this world's workers are processes. {FOR_ANY_WORLD}"
            )
        self.engine = Threads(Members(worker, range(worker.size) if workers is None else workers))
        self.rank, self.size = self.members.rank, self.members.size

    def __repr__(self) -> str:
        return f"Local(rank={self.rank}, size={self.size})"

    def agree(self, text: str) -> None:
        finish_programs()  # which meet in the same group
        super().agree(text)


@functools.cache
def in_order() -> Any:
    """Return the effect of callbacks that run in the program's order."""
    (effect,) = jax.make_jaxpr(lambda: io_callback(lambda: None, None, ordered=True))().effects
    return effect
