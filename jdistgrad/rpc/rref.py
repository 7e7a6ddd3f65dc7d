"""Remote references to values that stay on the worker that made them."""

import concurrent.futures
import operator
from collections.abc import Callable, Iterable
from typing import Any, Generic, TypeVar

import jax
import numpy as np

from jdistgrad._compat import trace_state_clean
from jdistgrad.corrections import Elsewhere
from jdistgrad.errors import DifferentiationError, NotOwnerError, StaleReferenceError
from jdistgrad.rpc import claims, traced_hook, trees
from jdistgrad.rpc.caller import Caller
from jdistgrad.rpc.claims import Claim, Key, MissingClaim, RuntimeKey, StandIn
from jdistgrad.rpc.current import fork_error
from jdistgrad.rpc.directory import WorkerInfo
from jdistgrad.rpc.functions import Args, Kwargs, describe
from jdistgrad.rpc.futures import done_future
from jdistgrad.rpc.handles import HANDLE, Handle, is_gradient, renewed
from jdistgrad.rpc.mailbox import Mailbox, current_mailbox, current_part, find_mailbox
from jdistgrad.rpc.references import References
from jdistgrad.wire.message import from_token, spell

T = TypeVar("T")


class ByReference:
    """A wrapper of an RRef that arrives as a reference, not as its value."""

    __slots__ = ("rref",)

    def __init__(self, rref: Any):
        self.rref = rref

    @property
    def traced_part(self) -> Any:
        """Return the handle, which JAX may be tracing: a wrapped reference counts as traced too."""
        return getattr(self.rref, "traced_part", None)


class MethodCaller:
    """An object with the methods of a referenced value, which run on the value's owner."""

    __slots__ = ("_call", "_rref", "_timeout")

    def __init__(self, rref: Any, call: Callable[..., Any], timeout: float | None):
        rref.home("calling a method")
        self._rref, self._call, self._timeout = rref, call, timeout

    def __getattr__(self, name: str) -> Callable[..., Any]:
        def method(*args: Any, **kwargs: Any) -> Any:
            target = (ByReference(self._rref), name, args, kwargs)
            return self._call(self._rref.owner, call_method, target, {}, self._timeout)

        return method


def call_method(reference: Any, name: str, args: Args, kwargs: Kwargs) -> Any:
    return getattr(reference.local_value(), name)(*args, **kwargs)


class RRef(Elsewhere, Generic[T]):
    """A reference to a value on some worker, its owner.

    As an argument of a remote call it arrives as its *value*, fetched from the owner if need be; ``by_reference``
    sends the reference itself. The value lives as long as any worker holds a reference to it.

    To JAX, a reference is a pytree with one leaf that stands for the value, so that derivatives can be taken with
    respect to the reference. The leaf is no number: computing with it is an error.

    Arguments:
      value: the value to refer to; it stays on this worker.

    Example:
      >>> params = jd.remote("worker1", init_params, args=(seed,))   # made and kept there
      >>> jd.rpc_sync("worker1", apply, args=(params, x))            # used there, no copy
      >>> params[0].shape                                            # of a reference to a part of it
      >>> params.to_here()                                           # a copy of it here
    """

    __slots__ = ("__weakref__", "claim", "handle", "token")
    claim: Claim
    handle: Any
    token: Any

    def __init__(self, value: T):
        references, handler = current_part(References), traced_hook.handler_for(value)
        made = RRef.of(references.own(value)) if handler is None else handler.own(value)
        self.claim, self.handle, self.token = made.claim, made.handle, made.token

    @classmethod
    def of(cls, claim: Any, handle: Any = HANDLE, token: Any = None) -> "RRef[Any]":
        reference = object.__new__(cls)
        reference.claim, reference.handle, reference.token = claim, handle, token
        return reference

    @property
    def traced_part(self) -> Any:
        """Return the handle, which JAX may be tracing."""
        return self.handle

    @property
    def id(self) -> int:
        """Return the reference's 64-bit id, with the rank of the worker that made it in the top 16 bits."""
        return self.claim.id

    @property
    def owner(self) -> WorkerInfo:
        """Return the worker that holds the value."""
        mailbox = self.claim.mailbox if isinstance(self.claim, Claim) else current_mailbox()
        return mailbox.directory.workers[self.claim.owner]

    def is_owner(self) -> bool:
        """Return whether this worker holds the value."""
        return self.claim.owner == self.home("is_owner").rank

    def to_here(self, timeout: float | None = None) -> T:
        """Return the value: the value itself on its owner, a copy elsewhere. Waits until the value has been made.

        Raises:
          CallTimeoutError: the value did not come within ``timeout`` seconds (default: the world's timeout).
          Exception: the function of ``remote`` raised it.
        """
        here, handler = self.home("to_here"), traced_hook.handler_for(self)
        value: T = self.value_future(timeout).result() if handler is None else handler.fetch(self, timeout)
        return trees.steady(value) if here.shares_process and self.claim.owner != here.rank else value

    def local_value(self) -> T:
        """Return the value itself, on its owner only; no copy is made.

        Raises:
          NotOwnerError: this worker does not own the value.
        """
        here = self.home("local_value")
        if self.claim.owner != here.rank:
            raise NotOwnerError(
                f"local_value() of {self} was called on {here.info}, but only its owner {self.owner} holds the "
                "value. Use to_here() for a copy.",
                owner=self.owner,
            )
        return self.to_here()

    def creation(self, timeout: float | None = None) -> concurrent.futures.Future[Any]:
        """Return a future that is done when the value has been made on its owner, or could not be made.

        On the worker that called ``remote``, the future fails after the timeout given there; the value itself can still
        be fetched later.
        """
        sent = ByReference(RRef.of(self.claim))
        return self.home("creation").part(References).creation(self.claim, sent, timeout)

    def __getitem__(self, key: Any) -> "RRef[Any]":
        """Return a reference to a part of the value, which stays where it is: no copy, and differentiable."""
        return remote(self.owner, operator.getitem, (self, key), {}, None)

    __iter__ = __contains__ = None  # Python would ask for one part after the other, for ever

    @property
    def shape(self) -> tuple[int, ...]:
        """Ask the owner for the shape of the value. Waits until the value has been made."""
        found: tuple[int, ...] = rpc_sync(self.owner, getattr, (self, "shape"), {}, None)
        return found

    @property
    def dtype(self) -> Any:
        """Ask the owner for the dtype of the value. Waits until the value has been made."""
        return rpc_sync(self.owner, getattr, (self, "dtype"), {}, None)

    def rpc_sync(self, timeout: float | None = None) -> "MethodCaller":
        """Call a method of the value where it lives: ``rref.rpc_sync().method(x)``."""
        return MethodCaller(self, rpc_sync, timeout)

    def rpc_async(self, timeout: float | None = None) -> "MethodCaller":
        """Call a method as with ``rpc_sync``; the call returns a future."""
        return MethodCaller(self, rpc_async, timeout)

    def remote(self, timeout: float | None = None) -> "MethodCaller":
        """Call a method as with ``rpc_sync``; the call returns a reference to the result."""
        return MethodCaller(self, remote, timeout)

    def home(self, what: str) -> Mailbox:
        """Return the mailbox of the worker that this code runs on. Raises if it is not in the reference's world."""
        if not isinstance(self.handle, Handle | jax.core.Tracer):
            raise TypeError(
                f"{what}: a function (of jax.tree.map, for example) has put {self.handle!r:.60} in place of the leaf "
                f"of {self}. jd.tree_map(f, reference) maps over the value."
            )
        if is_gradient(self.handle):
            raise DifferentiationError(
                f"{what}: {self} came out of jax.grad as a gradient: it says where the gradient is, not what. Use "
                "jd.grad or jd.value_and_grad, whose results have to_here(), or jd.get_gradients(ctx) on the owner."
            )
        mailbox, world = find_mailbox(), self.claim.key.world
        if mailbox is None or world not in (None, mailbox.world):
            again = f"again in this world{', when one is open (jdistgrad.init)' if mailbox is None else ''}"
            why = fork_error() or f"{self} belongs to a world that has been shut down. Make the value {again}."
            raise StaleReferenceError(f"{what}: {why}")
        return mailbox

    def value_future(self, timeout: float | None) -> concurrent.futures.Future[Any]:
        """Return a future of the value."""
        if isinstance(self.claim, StandIn):
            return done_future(self.claim.value)
        return self.home("fetching").part(References).fetch(self.claim, timeout)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, RRef):
            return NotImplemented
        return self.claim.key == other.claim.key and is_gradient(self.handle) == is_gradient(other.handle)

    def __hash__(self) -> int:
        return hash(self.id)

    def __repr__(self) -> str:
        return f"RRef({spell(self.id)} on {self.owner})"

    def __deepcopy__(self, memo: Any = None) -> "RRef[Any]":
        return self

    __copy__ = __deepcopy__

    def __reduce__(self) -> Any:
        self.home("sending")
        if isinstance(self.claim, StandIn):
            return RRef.of, (self.claim,)
        return _arrived, (claims.ship(self.claim),)


def staged_reference(owner: int, results: Any, handle: Any, token: Any) -> RRef[Any]:
    """Return a reference to a value that staged code will make, or has made if the token is known."""
    return _unflatten(RuntimeKey(owner, results), (handle, token))


def _unflatten(key: Any, children: Any) -> RRef[Any]:
    if isinstance(key, StandIn):
        return RRef.of(key, *children)
    mailbox = find_mailbox()
    handle, token = renewed(children[0]), (children[1] if isinstance(key, RuntimeKey) else None)
    if token is not None and isinstance(token, np.ndarray | jax.Array) and not isinstance(token, jax.core.Tracer):
        (identifier,) = from_token(token)
        key, token = Key(identifier, key.owner, "" if mailbox is None else mailbox.world), None
    claim = None
    if mailbox is not None and isinstance(key, Key) and key.world == mailbox.world:
        claim = mailbox.part(References).claims.get(key.id)
    return RRef.of(claim or MissingClaim(key), handle, token)


jax.tree_util.register_pytree_node(
    RRef,
    lambda rref: ((rref.handle,) if rref.token is None else (rref.handle, rref.token), rref.claim.key),
    _unflatten,
)
trees.OPAQUE.add(RRef)


def _arrived(number: int) -> RRef[Any]:
    return RRef.of(claims.decoding.place.held[number])


def by_reference(rref: Any) -> Any:
    """Pass a reference itself to a remote call, instead of its value; or all those in a tree, such as a RemoteModule.

    Example:
      >>> jd.rpc_sync("worker1", keep_for_later, args=(jd.by_reference(rref),))
      >>> jd.rpc_sync("worker1", keep_for_later, args=(jd.by_reference([enc, dec]),))
    """
    if not any(isinstance(leaf, RRef) for leaf in trees.leaves(rref)):
        raise TypeError(f"by_reference takes an RRef, or a tree that has some, not {rref!r:.60}")
    return references_kept(rref)


def references_kept(tree: Any) -> Any:
    """Return a tree that arrives, as an argument, with its references instead of their values, if it has some."""
    return trees.map_leaves(_wrapped, tree)


def _wrapped(leaf: Any) -> Any:
    if not isinstance(leaf, RRef):
        return leaf
    leaf.home("sending")
    return ByReference(leaf)


def handler_of_call(function: Any, args: Args, kwargs: Kwargs) -> Any:
    """Return the handler that takes over a call on traced values, or None.

    Raises EncodingError if a function holds a traced value, because no derivative would see it.
    """
    if trace_state_clean():
        return None
    opaque = [function, *filter(traced_hook.may_hold_arrays, trees.leaves((args, kwargs)))]
    if traced_hook.holds_traced(opaque):
        what = f"cannot call {describe(function)}: it, or a function or object among its arguments, holds an array"
        raise traced_hook.refuse_traced(what)
    return traced_hook.handler_for(args, kwargs)


def rpc_sync(to: Any, function: Any, args: Args, kwargs: Kwargs, timeout: float | None) -> Any:
    caller, handler = current_part(Caller), handler_of_call(function, args, kwargs)
    return (handler or caller).rpc_sync(to, function, args, kwargs, timeout)


def rpc_async(to: Any, function: Any, args: Args, kwargs: Kwargs, timeout: float | None) -> Any:
    caller, handler = current_part(Caller), handler_of_call(function, args, kwargs)
    caller.make_room()
    return (handler or caller).rpc_async(to, function, args, kwargs, timeout)


def rpc_all(workers: Iterable[Any], function: Any, args: Args, kwargs: Kwargs, timeout: float | None) -> list[Any]:
    caller, handler = current_part(Caller), handler_of_call(function, args, kwargs)
    if handler is not None:
        return [handler.rpc_async(to, function, args, kwargs, timeout) for to in workers]
    caller.make_room()
    return list(caller.start_all(workers, (function, args, kwargs), timeout))


def remote(to: Any, function: Any, args: Args, kwargs: Kwargs, timeout: float | None) -> RRef[Any]:
    references, handler = current_part(References), handler_of_call(function, args, kwargs)
    current_part(Caller).make_room()
    if handler is not None:
        made: RRef[Any] = handler.remote(to, function, args, kwargs, timeout)
        return made
    return RRef.of(references.call_remote(to, function, args, kwargs, timeout))
