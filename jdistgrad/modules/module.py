"""RemoteModule, a flax module on another worker."""

from collections.abc import Sequence
from typing import Any

import jax

from jdistgrad.modules.applying import Apply, apply_of, make
from jdistgrad.modules.function import RemoteFunction
from jdistgrad.rpc import api
from jdistgrad.rpc.calls.caller import AnyWorker
from jdistgrad.rpc.functions import Args


@jax.tree_util.register_pytree_node_class
class RemoteModule(RemoteFunction):
    """A flax module on another worker, where its parameters are made and stay, and where it runs.

    See ``RemoteFunction`` for calling and differentiating it. The module is compiled there once for each shape, and so
    is its derivative. ``parameters`` refers to a plain dict of arrays. The other arrays (``state``: batch statistics,
    the counters of random generators) never change after they were made: pass linen's ``rngs=`` with each call.

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
        apply = _apply_for(module, args)
        parameters, state = api.rpc_sync(to, make, (apply, rng, args), timeout=timeout)
        self._consist_of(parameters, state, apply.with_state(stateful=state is not None), timeout)


def _apply_for(module: Any, args: Args) -> Apply:
    kind, blueprint = _described(module, args)
    try:
        hash(blueprint)
    except TypeError as error:
        raise TypeError(
            f"RemoteModule: a module of type {blueprint.label} holds something that cannot be hashed ({error}), so it "
            "would be compiled for every call. Give it plain values, or write it as a jdistgrad.RemoteFunction."
        ) from error
    return apply_of(kind, blueprint, False)  # noqa: FBT003


def _described(module: Any, args: Args) -> tuple[Any, Any]:
    """Return the ``Apply`` class and blueprint of a module. Only here is flax imported: that is slow."""
    from flax import linen as flax_linen, nnx as flax_nnx

    from jdistgrad.modules import linen, nnx

    if isinstance(module, flax_linen.Module):
        linen.require_arguments(module, args)
        return linen.LinenApply, linen.blueprint_of(module)
    is_linen_class = isinstance(module, type) and issubclass(module, flax_linen.Module)
    if callable(module) and not is_linen_class and not isinstance(module, flax_nnx.Module):
        return nnx.NnxApply, nnx.blueprint_of(module)
    raise TypeError(
        f"RemoteModule takes a flax.linen module, or a class or function that makes a flax.nnx module when called with "
        f"rngs, not {module!r:.80}. An existing nnx module cannot be moved: pass the class or function that makes it, "
        "and the worker calls that."
    )
