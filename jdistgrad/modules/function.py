"""Functions and flax modules whose parameters live on another worker, where they run."""

import contextlib
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

import jax
import numpy as np

from jdistgrad.corrections import Corrected
from jdistgrad.modules.applying import Apply, Blueprint, apply_of, make
from jdistgrad.optim.values import converted, difference
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
    ``by_reference(function)`` passes it with the reference: it still runs on the owner.

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
        "load_state_dict": "restore(variables) takes the result of variables()",
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
        self.apply, self.timeout = apply, timeout
        self.parameters, self.state = init, None
        if not isinstance(init, RRef):
            self.parameters = api.rpc_sync(to, make_parameters, (init, tuple(args)), timeout=timeout)

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
        """Restore the result of ``variables`` on the owner. References and their optimizers stay valid.

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
        function = object.__new__(cls)
        function.parameters, function.state = children
        function.apply, function.timeout = fixed
        return function

    def __repr__(self) -> str:
        return f"{type(self).__name__}({getattr(self.apply, 'label', self.apply)}, parameters={self.parameters})"


@jax.tree_util.register_pytree_node_class
class RemoteModule(RemoteFunction):
    """A flax module on another worker, where its parameters are made and stay, and where it runs.

    See ``RemoteFunction`` for calling and differentiating it. The module is compiled there once for each shape, and so
    is its derivative. ``parameters`` refers to a plain dict of arrays.

    Its other arrays (``state``: batch statistics, the counters of random generators) live there too, and a call changes
    them as flax does: a linen module's, those that ``mutable=["batch_stats"]`` names (the call still returns only the
    result); an nnx module's, those that the module changes in the mode set by ``train`` and ``eval``. A call changes
    state once, whatever derivatives are taken. Calls follow each other in the order of the program, also in
    ``jdistgrad.jit``; calls by ``rpc_async`` and ``remote`` that do not wait for each other, in the order of arrival.
    To ``jax.jit``, ``scan`` and ``jax.checkpoint`` every call is pure, so they may merge, reorder, drop or repeat
    calls: call modules in training from Python or in ``jdistgrad.jit``.

    Arguments:
      to: the worker: its name, its rank or its ``WorkerInfo``.
      module: a ``flax.linen`` module; or for ``flax.nnx`` a class or function that makes a module when called with
        ``rngs`` (``functools.partial(Encoder, 64)`` if it takes other arguments too). The class or function must be
        importable on both sides.
      example_args: arguments to initialize a linen module with.
      rng: a seed or a JAX key.
      timeout: seconds a call may take; default the world's.

    Raises:
      TypeError: ``module`` is not of these kinds, holds a value that cannot be hashed, or cannot be called with
        ``example_args``.
      Exception: any exception of making the module on the worker.

    Example:
      >>> encoder = jd.RemoteModule("worker1", nn.Dense(64), (x,), rng=0)
      >>> h = encoder(x)
      >>> optimizer = jd.DistributedOptimizer(optax.adam(1e-3), [encoder.parameters])
    """

    apply: Apply

    def __init__(
        self,
        to: AnyWorker,
        module: Any,
        example_args: Sequence[Any] = (),
        *,
        rng: Any = 0,
        timeout: float | None = None,
    ):
        args = tuple(example_args)
        kind, made = _taken_apart(module, args)
        rng = int(rng) if isinstance(rng, np.integer) else rng
        first = apply_of(kind, made, False, ())  # noqa: FBT003
        self.parameters, self.state = api.rpc_sync(to, make, (first, rng, args), timeout=timeout)
        self.apply, self.timeout = apply_of(kind, made, self.state is not None, ()), timeout

    def train(self, **attributes: Any) -> None:
        """Set the training mode of an nnx module as ``nnx.Module.train`` does, for calls by this object from now on.

        Pass the module to staged functions as an argument: closed-over modules keep the mode of the trace.
        """
        self._set_mode("train", attributes)

    def eval(self, **attributes: Any) -> None:
        """Set the evaluation mode of an nnx module as ``nnx.Module.eval`` does, by this object: see ``train``."""
        self._set_mode("eval", attributes)

    def _set_mode(self, method: str, attributes: Mapping[str, Any]) -> None:
        if not self.apply.has_modes:
            raise TypeError(
                f"{method}() is for nnx modules. Pass the mode of a linen module in the call, as in flax: "
                'module(x, train=True, mutable=["batch_stats"], rngs={"dropout": key})'
            )
        _, before = self.apply.mode or ("", ())
        mode = method, tuple(sorted({**dict(before), **attributes}.items()))  # flax keeps others, too
        kind: Any = type(self.apply)
        self.apply = apply_of(kind, self.apply.blueprint, self.state is not None, mode)


def put_back(references: Mapping[str, RRef[Any]], variables: Any) -> None:
    """Replace the values of references by saved ones, all or none."""
    owned = current_worker().references.owned
    with contextlib.ExitStack() as stack:
        for identifier in sorted(one.id for one in references.values()):
            stack.enter_context(owned.lock(identifier))  # a running call would overwrite the restored state
        known = {name: one.local_value() for name, one in references.items()}
        differs = difference(variables, known)
        if differs is not None:
            raise ValueError(f"restore on {current_worker().info}: {differs}. Nothing was changed.")
        for name, value in converted(variables, known).items():
            owned.replace(references[name].id, value)


def make_parameters(init: Callable[..., Any], args: Args) -> RRef[Any]:
    """Make parameters on their owner; return a reference to them."""
    return RRef(init(*args))


def _taken_apart(module: Any, args: Args) -> tuple[Any, Blueprint]:
    """Return how to apply a module, and its blueprint. Only here is flax imported: that is slow."""
    from flax import linen, nnx

    from jdistgrad.modules import flax_modules

    is_function = callable(module) and not isinstance(module, type | nnx.Module)
    if isinstance(module, linen.Module):
        try:
            inspect.signature(type(module).__call__).bind(module, *args)
        except TypeError as error:
            raise TypeError(
                f"RemoteModule: a linen module is initialized by a call, and {type(module).__name__} cannot be called "
                f"with these {len(args)} example arguments: {error}. Pass them as in RemoteModule(to, module, (x,))"
            ) from error
    elif not is_function and not (isinstance(module, type) and issubclass(module, nnx.Module)):
        raise TypeError(
            "RemoteModule takes a flax.linen module, or a class or function that makes a flax.nnx module when called "
            f"with rngs, not {module!r:.80}. Instead of an existing nnx module, pass the class or function that makes "
            "it. A model of any other library is jd.RemoteFunction(worker, init, apply): init returns its parameters, "
            "apply(parameters, *args) calls it."
        )
    try:
        made = flax_modules.blueprint(module)
        hash(made)
    except Exception as error:
        raise TypeError(
            f"RemoteModule: a module of type {type(module).__name__} holds something that cannot be pickled or hashed "
            f"({error}). Give it plain values, or write it as a jdistgrad.RemoteFunction."
        ) from error
    return flax_modules.LinenApply if isinstance(module, linen.Module) else flax_modules.NnxApply, made
