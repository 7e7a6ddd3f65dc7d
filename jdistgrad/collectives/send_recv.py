"""Arrays that one rank sends to another, which no third rank takes part in, and their derivatives.

What ``send`` returns is 0.0, and depends on what was sent; so where it is part of the sender's loss, JAX runs its
pullback, which receives the cotangent. What ``recv`` returns depends on whatever the receiver differentiates
(``after``); so JAX runs its pullback, which sends the cotangent back. Both pullbacks consist of ``send`` and ``recv``
again, and a pullback of ``send`` comes after the ``send`` itself: so derivatives of derivatives cross the wire in the
same way.

What carries the arrays are letters of the group (``rpc.meetings``), in order for each tag: words that describe an
array, which both ranks compare, and the array's bytes. The sender does not wait. The receiver waits until its timeout,
and no longer than the sender lives.
"""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jdistgrad.collectives.host_arrays import to_jax
from jdistgrad.errors import CollectiveError

TAGS = 1000


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

    def __str__(self) -> str:
        return f"rank {self.rank}" + (f" with tag {self.tag}" if self.tag else "")


def _peer(all_: Any, rank: Any, tag: Any, what: str) -> Peer:
    if not isinstance(all_.rank, int):
        raise CollectiveError(
            f"{all_!r}: here all ranks run one program, so no two of them can send and recv by themselves. "
            "Use permute(x, [(sender, receiver)])."
        )
    if not _is_number(rank) or not 0 <= rank < all_.size or rank == all_.rank:
        raise ValueError(
            f"{what}: the other rank is one from 0 to {all_.size - 1}, and not this one ({all_.rank}); got {rank!r}"
        )
    if not _is_number(tag) or not 0 <= tag < TAGS:
        raise ValueError(f"{what}: a tag is a whole number from 0 to {TAGS - 1}, not {tag!r}")
    return Peer(int(rank), int(tag))


def _is_number(given: Any) -> bool:
    return isinstance(given, int | np.integer) and not isinstance(given, bool)


def send(by: Any, tree: Any, to: int, after: Any, tag: int) -> jax.Array:
    peer, anchors, total = _peer(by, to, tag, "send"), _arrays_of(after), jnp.zeros((), np.float32)
    for leaf in map(to_jax, jax.tree.leaves(tree)):
        x = _tied(leaf, anchors)
        total += _sent(by, peer, x) if _is_smooth(x) else by.perform("send", x, peer)
    return total


def recv(by: Any, like: Any, source: int, after: Any, tag: int) -> Any:
    peer, anchors = _peer(by, source, tag, "recv"), _arrays_of(after)
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
def _sent(by: Any, peer: Peer, x: jax.Array) -> jax.Array:
    found: jax.Array = by.perform("send", x, peer)
    return found


def _sent_forward(by: Any, peer: Peer, x: jax.Array) -> tuple[jax.Array, Any]:
    nothing = _sent(by, peer, x)
    return nothing, (nothing, _Type(x.shape, x.dtype))


def _sent_backward(by: Any, peer: Peer, kept: Any, g: jax.Array) -> tuple[jax.Array]:
    nothing, kind = kept
    return (_received(by, peer.back(), kind.zeros(nothing), []),)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _received(by: Any, peer: Peer, like: jax.Array, after: Sequence[jax.Array]) -> jax.Array:
    found: jax.Array = by.perform("recv", like, peer)
    return found


def _received_forward(by: Any, peer: Peer, like: jax.Array, after: Sequence[jax.Array]) -> tuple[jax.Array, Any]:
    kinds = [_Type(one.shape, one.dtype) for one in (like, *after)]
    return _received(by, peer, like, after), kinds


def _received_backward(by: Any, peer: Peer, kinds: Sequence[_Type], g: jax.Array) -> tuple[Any, Any]:
    nothing = _sent(by, peer.back(), g)
    like, *after = [kind.zeros(nothing) for kind in kinds]
    return like, after


_sent.defvjp(_sent_forward, _sent_backward)
_received.defvjp(_received_forward, _received_backward)
