"""Point-to-point messages with derivatives.

``send`` returns 0.0, which depends on the arrays that were sent; so where this is part of the sender's loss, JAX runs
the pullback of ``send``, which receives the cotangent. The result of ``recv`` depends on the values that the receiver
differentiates (``after``); so JAX runs the pullback of ``recv``, which sends the cotangent back. Both pullbacks consist
of ``send`` and ``recv`` again, and a pullback of ``send`` comes after the ``send`` itself: so derivatives of
derivatives cross the wire in the same way.

The arrays travel as letters of the group (``rpc.meetings``), in order for each tag: a description, which both ranks
compare, and the bytes. The sender does not wait. The receiver waits until its timeout, and while the sender lives.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jdistgrad.collectives.host_arrays import to_jax
from jdistgrad.errors import CollectiveError

TAGS = 1000


class Peer(NamedTuple):
    """The other rank, the tag, and the order of the derivative: 0 for values, 1 for their cotangents, and so on."""

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
    if not _is_int(rank) or not 0 <= rank < all_.size or rank == all_.rank:
        raise ValueError(
            f"{what}: the other rank is one from 0 to {all_.size - 1}, and not this one ({all_.rank}); got {rank!r}"
        )
    if not _is_int(tag) or not 0 <= tag < TAGS:
        raise ValueError(f"{what}: a tag is a whole number from 0 to {TAGS - 1}, not {tag!r}")
    return Peer(int(rank), int(tag))


def _is_int(given: Any) -> bool:
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
        x = _tied(
            jnp.zeros(leaf.shape, leaf.dtype) if isinstance(leaf, jax.ShapeDtypeStruct) else jnp.asarray(leaf), anchors
        )
        return _received(by, peer, x, smooth) if _is_smooth(x) else by.perform("recv", x, peer)

    return jax.tree.map(received, like)


def _arrays_of(after: Any) -> list[jax.Array]:
    """Return the arrays in a tree that are not random keys."""
    leaves = map(jnp.asarray, jax.tree.leaves(after))
    return [one for one in leaves if not jnp.issubdtype(one.dtype, jax.dtypes.extended)]


def _tied(x: jax.Array, anchors: Sequence[jax.Array]) -> jax.Array:
    """Make an array depend on others: JAX hoists values out of a loop that do not depend on it."""
    for one in anchors:
        if isinstance(one, jax.core.Tracer):
            x = jnp.where(jnp.any(one.reshape(-1)[:1] != 0), x, x)
    return x


def _is_smooth(x: jax.Array) -> bool:
    return bool(jnp.issubdtype(x.dtype, jnp.inexact))


def _zeros(kind: Any, nothing: jax.Array) -> jax.Array:
    """Return zeros that depend on a zero."""
    return jnp.zeros(kind.shape, kind.dtype) + nothing.astype(kind.dtype)


def _sent(by: Any, peer: Peer, x: jax.Array) -> jax.Array:
    kind = jax.ShapeDtypeStruct(x.shape, x.dtype)

    @jax.custom_vjp
    def sent(x: jax.Array) -> Any:
        return by.perform("send", x, peer)

    def backward(nothing: jax.Array, g: jax.Array) -> tuple[jax.Array]:
        return (_received(by, peer.back(), _zeros(kind, nothing), []),)

    sent.defvjp(lambda x: (sent(x),) * 2, backward)
    return sent(x)


def _received(by: Any, peer: Peer, like: jax.Array, after: Sequence[jax.Array]) -> jax.Array:
    kinds = [jax.ShapeDtypeStruct(one.shape, one.dtype) for one in (like, *after)]

    @jax.custom_vjp
    def received(like: jax.Array, after: Sequence[jax.Array]) -> Any:
        return by.perform("recv", like, peer)

    def backward(_: None, g: jax.Array) -> tuple[jax.Array, list[jax.Array]]:
        nothing = _sent(by, peer.back(), g)
        like, *after = [_zeros(kind, nothing) for kind in kinds]
        return like, after

    received.defvjp(lambda like, after: (received(like, after), None), backward)
    return received(like, after)
