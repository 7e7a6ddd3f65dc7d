"""A function whose parameters live on another worker, where it runs."""

import contextlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

import jax

from jdistgrad.corrections import Corrected
from jdistgrad.optim import restoring
from jdistgrad.rpc import api
from jdistgrad.rpc.caller import AnyWorker
from jdistgrad.rpc.directory import WorkerInfo
from jdistgrad.rpc.functions import Args
from jdistgrad.rpc.futures import CallFuture
from jdistgrad.rpc.rref import RRef, by_reference, references_kept
from jdistgrad.rpc.worker import current_worker


@jax.tree_util.register_pytree_node_class
class RemoteFunction(Corrected):
    """A function ``apply(parameters, *args)`` that runs where its parameters live.

    Calling it is a remote call: only arguments and results travel. The function is a pytree whose leaf is the reference
    to the parameters, so it can be differentiated like any argument; its gradient stays on the owner.

    As an argument of a remote call it arrives with the parameters themselves, and runs on the worker that is called.
    ``by_reference(function)`` passes it on with the reference: it runs where it did.

    Arguments:
      to: the worker: its name, its rank or its ``WorkerInfo``.
      init: a function that makes the parameters there from ``args``, or a reference to existing parameters.
      apply: a function both sides can import, or have registered. If it is jitted, its derivative is compiled too.
      args: the arguments of ``init``.
      timeout: seconds a call may take; default the world's.

    Raises:
      Exception: any exception of ``init``.

    Example:
      >>> encode = jd.RemoteFunction("worker1", init_encoder, encoder, args=(seed,))
      >>> with jd.context() as ctx:
      ...     loss, gradients = jd.value_and_grad(loss_fn)(encode, x)      # loss_fn calls encode(x)
      ...     jd.DistributedOptimizer(tx, [encode.parameters]).step(ctx)
    """

    corrections: ClassVar = {
        "to_here": "module.parameters.to_here() returns a copy of its parameters",
        "params": "module.parameters refers to its parameters, module.parameters.to_here() returns a copy of them",
        "state_dict": "variables() returns parameters and state",
        "load_state_dict": "restore(variables) takes what variables() returned",
    }

    parameters: Any
    state: Any

    def __init__(
        self,
        to: AnyWorker,
        init: Callable[..., Any] | RRef[Any],
        apply: Callable[..., Any],
        *,
        args: Sequence[Any] = (),
        timeout: float | None = None,
    ):
        if not isinstance(init, RRef):
            init = api.rpc_sync(to, make_parameters, (init, tuple(args)), timeout=timeout)
        self._consist_of(init, None, apply, timeout)

    def _consist_of(self, parameters: Any, state: Any, apply: Callable[..., Any], timeout: float | None) -> None:
        self.parameters, self.state, self.apply, self.timeout = parameters, state, apply, timeout

    @property
    def owner(self) -> WorkerInfo:
        """The worker that the function runs on."""
        return self.parameters.owner

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the function and wait for the result. Raise the exceptions of a remote call."""
        if not isinstance(self.parameters, RRef):
            return self.apply(*self._arguments(args), **kwargs)
        return api.rpc_sync(self.owner, self.apply, self._arguments(args), kwargs, timeout=self.timeout)

    def rpc_async(self, *args: Any, **kwargs: Any) -> CallFuture[Any]:
        """Run the function without waiting; return a future of the result."""
        return api.rpc_async(self.owner, self.apply, self._arguments(args), kwargs, timeout=self.timeout)

    def remote(self, *args: Any, **kwargs: Any) -> RRef[Any]:
        """Run the function and leave the result on the owner; return a reference to the result."""
        return api.remote(self.owner, self.apply, self._arguments(args), kwargs, timeout=self.timeout)

    def with_parameters(self, parameters: RRef[Any]) -> "RemoteFunction":
        """Return the same function with other parameters: restored ones, or the parameters of another worker."""
        return self.tree_unflatten((self.apply, self.timeout), (parameters, self.state))

    @property
    def references(self) -> dict[str, RRef[Any]]:
        """The references to everything the owner keeps: ``{"parameters", "state"}``."""
        found = {"parameters": self.parameters}
        return found if self.state is None else found | {"state": self.state}

    def variables(self, timeout: float | None = None) -> dict[str, Any]:
        """Return a copy of everything the owner keeps, as a tree that can be saved: ``{"parameters", "state"}``."""
        return {name: reference.to_here(timeout) for name, reference in self.references.items()}

    def restore(self, variables: Mapping[str, Any], timeout: float | None = None) -> None:
        """Put back on the owner what ``variables`` returned. The references stay, so optimizers of them go on.

        Raises:
          ValueError: the variables have another structure, or other shapes or dtypes; nothing was changed.
        """
        given = references_kept(dict(variables))
        api.rpc_sync(self.owner, put_back, (by_reference(self.references), given), timeout=timeout)

    def _arguments(self, args: Args) -> tuple[Any, ...]:
        if self.state is None:
            return self.parameters, *args
        state = jax.tree.map(jax.lax.stop_gradient, self.state)
        return self.parameters, by_reference(state) if isinstance(state, RRef) else state, *args

    def tree_flatten(self) -> tuple[tuple[Any, Any], tuple[Any, Any]]:
        return (self.parameters, self.state), (self.apply, self.timeout)

    @classmethod
    def tree_unflatten(cls, fixed: tuple[Any, Any], children: Sequence[Any]) -> "RemoteFunction":
        function, (parameters, state), (apply, timeout) = object.__new__(cls), children, fixed
        function._consist_of(parameters, state, apply, timeout)
        return function

    def __repr__(self) -> str:
        return f"{type(self).__name__}({getattr(self.apply, 'label', self.apply)}, parameters={self.parameters})"


def put_back(references: Mapping[str, RRef[Any]], variables: Any) -> None:
    """Replace the values of references by saved ones, all or none."""
    owned = current_worker().references.owned
    with contextlib.ExitStack() as stack:
        for identifier in sorted(one.id for one in references.values()):
            stack.enter_context(owned.lock(identifier))  # a call under way would put its own state in place after this
        known = {name: one.local_value() for name, one in references.items()}
        differs = restoring.difference(variables, known)
        if differs is not None:
            raise ValueError(
                f"restore on {current_worker().info}: {differs}. Nothing was changed. Restore what variables() gave."
            )
        for name, value in restoring.converted(variables, known).items():
            owned.replace(references[name].id, value)


def make_parameters(init: Callable[..., Any], args: Args) -> RRef[Any]:
    """Make parameters on their owner; return a reference to them."""
    return RRef(init(*args))
