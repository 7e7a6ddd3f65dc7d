"""Arrays that one rank sends to another, which no third rank takes part in, and their derivatives.

What ``send`` returns is 0.0, and depends on what was sent; so where it is part of the sender's loss, JAX runs its
pullback, which receives the cotangent. What ``recv`` returns depends on whatever the receiver differentiates
(``after``); so JAX runs its pullback, which sends the cotangent back. Both pullbacks consist of ``send`` and ``recv``
again, and a pullback of ``send`` comes after the ``send`` itself: so derivatives of derivatives cross the wire in the
same way.

What carries the arrays are letters, in order for each tag: words that describe an array, which both ranks compare, and
the array's bytes. The sender does not wait. The receiver waits until its timeout, and no longer than the sender lives.
"""

import dataclasses
import functools
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import io_callback

from jdistgrad.data_parallel.buckets.host_arrays import like as placed_like, to_jax
from jdistgrad.data_parallel.collectives.primitive import collective_p
from jdistgrad.data_parallel.collectives.world import CollectiveEntry, WatchedBlock
from jdistgrad.errors import DisagreementError, MissingRanksError
from jdistgrad.ffi.dispatch import finish_programs
from jdistgrad.ffi.lowering import call_in_order, on_cpus

TAGS = 1000
Check = Callable[[], None]
NOTHING = jax.ShapeDtypeStruct((), np.float32)  # what ``send`` returns


class Post(Protocol):
    def send(self, x: np.ndarray, words: str, to: int, tag: int) -> None: ...

    def recv(self, words: str, source: int, tag: int) -> np.ndarray:
        """Return the bytes of the next array from a rank.

        Raises:
          MissingRanksError: no array has come in time.
          DisagreementError: it is described by other words. The array is lost.
          WorkerLostError: the sender is lost.
        """


class Receiving:
    """A receiver's wait for a letter, of which the watchdog knows.

    Arguments:
      group: a name of the ranks that is the same on all of them; ``ranks``: as the world counts them.
      me, source: the receiver and the sender, as the group counts them.
    """

    def __init__(self, worker: Any, group: Any, ranks: Sequence[int], me: int, source: int, tag: int, timeout: float):
        self._worker, self._group = worker, (group, source, me, tag)
        self._ranks, self._source, self._end = [ranks[me], ranks[source]], source, time.monotonic() + timeout
        self._timeout = timeout
        self.what = f"recv from rank {source}" + (f" with tag {tag}" if tag else "")

    def until(self, wait: Callable[[float, Check], bool], *, begun: bool = False) -> None:
        """Wait by a function of the seconds left and a check, which raises if nothing will come.

        Arguments:
          begun: whether a part has come. The sender may be elsewhere meanwhile.
        """
        entry = CollectiveEntry(self.what, self._group, 0, may_leave=begun)
        with WatchedBlock(self._worker, entry, self._ranks, blocking=False) as block:
            if wait(self._end - time.monotonic(), block.check):
                return
            place = block.places([1]).get(1)  # of the block's two ranks
        part, where = "only a part has come" if begun else "nothing has come", f" (it is at {place})" if place else ""
        raise MissingRanksError(
            f"{self.what}: {part} within {self._timeout:g} s{where}. For each recv, and each derivative of a send, the "
            "other rank has to send: what it received must depend on what it differentiates (recv's after=), and what "
            "send and recv returned must be part of the losses.",
            missing=[self._source],
            seconds=self._timeout,
        )

    def check_words(self, sent: str, expected: str) -> None:
        if sent != expected:
            raise DisagreementError(
                f"{self.what}: expected {expected}, but rank {self._source} sent {sent}. recv(like, ...) takes arrays, "
                "or jax.ShapeDtypeStruct, of the shapes and dtypes that are sent, in the same order. Where one rank "
                "differentiates, the other has to.",
                rank=self._source,
            )


class Peer(NamedTuple):
    """The other rank, and what tells messages between the same ranks apart.

    ``order``: 0 for what a program sends, 1 for its cotangents, and so on. Ranks that do not differentiate alike would
    otherwise take one for the other.
    """

    rank: int
    tag: int
    order: int = 0

    def back(self) -> "Peer":
        return self._replace(order=self.order + 1)

    def words(self, x: Any) -> str:
        """Describe an array on this way, as both ranks compare it."""
        return f"{'cotangent of ' * self.order}{x.dtype}{list(x.shape)}"


class Pairs:
    """What performs ``send`` and ``recv``: at once on concrete arrays, or as parts of a compiled program.

    Arguments:
      group: the collectives, as seen by a rank.
      effect: the ordered effect of compiled operations.
    """

    def __init__(self, group: Any, post: Post, effect: Any):
        self.rank, self.size = group.rank, group.size
        self._group, self._post, self._effect = group, post, effect

    def peer(self, rank: int, tag: int, what: str) -> Peer:
        if not _is_number(rank) or not 0 <= rank < self.size or rank == self.rank:
            raise ValueError(
                f"{what}: the other rank is one from 0 to {self.size - 1}, and not this one ({self.rank}); got {rank!r}"
            )
        if not _is_number(tag) or not 0 <= tag < TAGS:
            raise ValueError(f"{what}: a tag is a whole number from 0 to {TAGS - 1}, not {tag!r}")
        return Peer(int(rank), int(tag))

    def perform(self, name: str, x: jax.Array, how: Any = None) -> jax.Array:
        return collective_p.bind(x, by=self, name=name, how=how)

    def eager(self, name: str, x: jax.Array, how: Any = None) -> jax.Array:
        finish_programs()  # what they send and receive comes before
        found = self._carried(name, np.asarray(x), how)
        return jnp.asarray(found) if name == "send" else placed_like(found, x)

    def traced(self, name: str, x: jax.Array, how: Any = None) -> jax.Array:
        result = NOTHING if name == "send" else jax.ShapeDtypeStruct(x.shape, x.dtype)

        def carry(x: Any) -> np.ndarray:
            return self._carried(name, np.asarray(x), how)

        if not on_cpus():
            return io_callback(carry, result, x, ordered=True)
        (made,) = call_in_order(lambda x: [carry(x)], [result], x, effect=self._effect)
        return made

    def _carried(self, name: str, x: np.ndarray, peer: Peer) -> np.ndarray:
        if self._group.refusal is not None:
            raise self._group.refusal
        if name == "recv":
            found = self._post.recv(peer.words(x), peer.rank, peer.tag)
            return found.view(x.dtype).reshape(x.shape)
        self._post.send(x, peer.words(x), peer.rank, peer.tag)
        return np.zeros((), np.float32)


def _is_number(given: Any) -> bool:
    return isinstance(given, int | np.integer) and not isinstance(given, bool)


def send(collectives: Any, tree: Any, to: int, after: Any, tag: int) -> jax.Array:
    by = collectives.pairs()
    peer, anchors, total = by.peer(to, tag, "send"), _arrays_of(after), jnp.zeros((), np.float32)
    for leaf in map(to_jax, jax.tree.leaves(tree)):
        x = _tied(leaf, anchors)
        total += _sent(by, peer, x) if _is_smooth(x) else by.perform("send", x, peer)
    return total


def recv(collectives: Any, like: Any, source: int, after: Any, tag: int) -> Any:
    by = collectives.pairs()
    peer, anchors = by.peer(source, tag, "recv"), _arrays_of(after)
    smooth = [*filter(_is_smooth, anchors)]

    def received(leaf: Any) -> jax.Array:
        mould = jnp.zeros(leaf.shape, leaf.dtype) if isinstance(leaf, jax.ShapeDtypeStruct) else jnp.asarray(leaf)
        mould = _tied(mould, anchors)
        return _received(by, peer, mould, smooth) if _is_smooth(mould) else by.perform("recv", mould, peer)

    return jax.tree.map(received, like)


def _arrays_of(after: Any) -> list[jax.Array]:
    """Return the arrays of numbers in a tree: all but random keys."""
    leaves = map(jnp.asarray, jax.tree.leaves(after))
    return [one for one in leaves if not jnp.issubdtype(one.dtype, jax.dtypes.extended)]


def _tied(x: jax.Array, anchors: Sequence[jax.Array]) -> jax.Array:
    """Return an array as one that depends on others: JAX takes out of a loop what does not depend on the loop."""
    for one in anchors:
        if isinstance(one, jax.core.Tracer):
            x = jnp.where(jnp.any(one.reshape(-1)[:1] != 0), x, x)
    return x


def _is_smooth(x: jax.Array) -> bool:
    return bool(jnp.issubdtype(x.dtype, jnp.inexact))


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class _Type:
    shape: tuple[int, ...]
    dtype: Any

    def zeros(self, nothing: jax.Array | float = 0.0) -> jax.Array:
        """Return zeros that depend on a zero."""
        return jnp.zeros(self.shape, self.dtype) + jnp.asarray(nothing, self.dtype)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _sent(by: Pairs, peer: Peer, x: jax.Array) -> jax.Array:
    return by.perform("send", x, peer)


def _sent_forward(by: Pairs, peer: Peer, x: jax.Array) -> tuple[jax.Array, Any]:
    nothing = _sent(by, peer, x)
    return nothing, (nothing, _Type(x.shape, x.dtype))


def _sent_backward(by: Pairs, peer: Peer, kept: Any, g: jax.Array) -> tuple[jax.Array]:
    nothing, kind = kept
    return (_received(by, peer.back(), kind.zeros(nothing), []),)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _received(by: Pairs, peer: Peer, like: jax.Array, after: Sequence[jax.Array]) -> jax.Array:
    return by.perform("recv", like, peer)


def _received_forward(by: Pairs, peer: Peer, like: jax.Array, after: Sequence[jax.Array]) -> tuple[jax.Array, Any]:
    kinds = [_Type(one.shape, one.dtype) for one in (like, *after)]
    return _received(by, peer, like, after), kinds


def _received_backward(by: Pairs, peer: Peer, kinds: Sequence[_Type], g: jax.Array) -> tuple[Any, Any]:
    nothing = _sent(by, peer.back(), g)
    like, *after = [kind.zeros(nothing) for kind in kinds]
    return like, after


_sent.defvjp(_sent_forward, _sent_backward)
_received.defvjp(_received_forward, _received_backward)
