"""RemoteModule, a flax module on another worker."""

import inspect
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np

from jdistgrad.modules.applying import Apply, apply_of, make
from jdistgrad.modules.blueprint import blueprint
from jdistgrad.modules.function import RemoteFunction
from jdistgrad.rpc import api
from jdistgrad.rpc.caller import AnyWorker
from jdistgrad.rpc.functions import Args


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
        parameters, state = api.rpc_sync(to, make, (apply_of(kind, made, False, ()), rng, args), timeout=timeout)  # noqa: FBT003
        self._consist_of(parameters, state, apply_of(kind, made, state is not None, ()), timeout)

    def train(self, **attributes: Any) -> None:
        """Set the training mode of an nnx module as ``nnx.Module.train`` does, for calls by this object from now on.

        Pass the module to staged functions as an argument: what they close over stays as it was traced.
        """
        self._set_mode("train", attributes)

    def eval(self, **attributes: Any) -> None:
        """Set the evaluation mode of an nnx module as ``nnx.Module.eval`` does, by this object: see ``train``."""
        self._set_mode("eval", attributes)

    def _set_mode(self, method: str, attributes: Mapping[str, Any]) -> None:
        if not self.apply.has_modes:
            raise TypeError(
                f"{method}() is for nnx modules. A linen module is told in the call, as in flax: "
                'module(x, train=True, mutable=["batch_stats"], rngs={"dropout": key})'
            )
        _, before = self.apply.mode or ("", ())
        every = {**dict(before), **attributes}  # as flax has it: what another mode does not set stays
        kind: Any = type(self.apply)
        mode = method, tuple(sorted(every.items()))
        self.apply = apply_of(kind, self.apply.blueprint, self.state is not None, mode)


def _taken_apart(module: Any, args: Args) -> tuple[Any, Any]:
    """Return how a module is applied, and its blueprint. Only here is flax imported: that is slow."""
    from flax import linen, nnx

    from jdistgrad.modules import flax_modules

    kind: Any
    is_linen_class = isinstance(module, type) and issubclass(module, linen.Module)
    if isinstance(module, linen.Module):
        try:
            inspect.signature(type(module).__call__).bind(module, *args)
        except TypeError as error:
            raise TypeError(
                f"RemoteModule: a linen module is initialized by a call, and {type(module).__name__} cannot be called "
                f"with these {len(args)} example arguments: {error}. Pass them as in RemoteModule(to, module, (x,))"
            ) from error
        kind, made = flax_modules.LinenApply, blueprint(module, flax_modules.take_apart)
    elif isinstance(module, type) and not is_linen_class and not issubclass(module, nnx.Module):
        raise TypeError(
            f"RemoteModule makes modules of flax, and {module.__name__} is none. A model of any library is "
            "jd.RemoteFunction(worker, init, apply): init returns its parameters, apply(parameters, *args) calls it."
        )
    elif callable(module) and not is_linen_class and not isinstance(module, nnx.Module):
        kind, made = flax_modules.NnxApply, flax_modules.factory_blueprint(module)
    else:
        raise TypeError(
            "RemoteModule takes a flax.linen module, or a class or function that makes a flax.nnx module when called "
            f"with rngs, not {module!r:.80}. An existing nnx module cannot be moved: pass the class or function that "
            "makes it, and the worker calls that."
        )
    try:
        hash(made)
    except TypeError as error:
        raise TypeError(
            f"RemoteModule: a module of type {made.label} holds something that cannot be hashed ({error}), so it "
            "would be compiled for every call. Give it plain values, or write it as a jdistgrad.RemoteFunction."
        ) from error
    return kind, made
