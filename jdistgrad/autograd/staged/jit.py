"""The staged step: trace once, compile the local pieces, and run pieces and messages as a dataflow from Python."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from jdistgrad._compat import trace_state_clean
from jdistgrad.autograd.staged.plan import Plan
from jdistgrad.autograd.staged.steps import Step
from jdistgrad.rpc.current import find_worker


def jit(fun: Callable[..., Any]) -> "StagedFunction":
    """Like ``jax.jit``, for functions that call other workers: the fast way to run a step.

    The function is traced once for each structure and shape of its arguments and cut at the wire. Calls whose inputs
    are ready go out together, local pieces (each compiled by ``jax.jit``) run while messages are under way, and errors
    and Ctrl-C arrive as ordinary exceptions. Nothing waits for more than it needs: a reference is passed on before its
    value has been made, and a pullback asked for before its call has been answered, where the cotangent is known. Calls
    of jitted functions on one worker that follow each other with nothing between, and pullbacks of them, are asked for
    in one message, which has the time of all of them; what one hands to the next never travels. Like ``jax.jit`` it may
    drop calls whose results nobody uses.

    Inside ``scan``, ``while_loop`` and ``cond`` a remote call is a host callback, as in ``jax.jit``.

    Arguments:
      fun: a pure function of arrays, pytrees and RRefs; usually a ``jdistgrad.value_and_grad(...)``.

    Returns:
      The function; ``.plan(*args)`` shows its pieces.

    Example:
      >>> step = jd.jit(jd.value_and_grad(loss_fn, argnums=(0, 1)))
      >>> with jd.context() as ctx:
      ...     loss, (enc_grad, head_grad) = step(enc, head, x, y)
      ...     optimizer.step(ctx)
    """
    if not callable(fun):
        raise TypeError(f"jdistgrad.jit takes a function, not a {type(fun).__name__}: {fun!r:.60}")
    return StagedFunction(fun)


class StagedFunction:
    """What ``jit`` returns."""

    def __init__(self, fun: Callable[..., Any]):
        functools.update_wrapper(self, fun)
        self._fun = fun
        self._steps: dict[Any, Step] = {}

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not trace_state_clean():
            return self._fun(*args, **kwargs)
        leaves, structure = jax.tree.flatten((args, kwargs))
        return self._step(leaves, structure).run(leaves)

    def plan(self, *args: Any, **kwargs: Any) -> Plan:
        """How the step is cut for arguments like these; printed, it shows the pieces and messages."""
        leaves, structure = jax.tree.flatten((args, kwargs))
        return self._step(leaves, structure).plan

    def _step(self, leaves: list[Any], structure: Any) -> "Step":
        worker = find_worker()
        key = (structure, None if worker is None else (worker.world, worker.rank), *map(_kind, leaves))
        step = self._steps.get(key)
        if step is None:
            step = self._steps[key] = Step(self._fun, leaves, structure)
        return step


def _kind(leaf: Any) -> Any:
    if isinstance(leaf, jax.Array):
        return leaf.shape, leaf.dtype, getattr(leaf, "weak_type", False)  # keys have none
    if isinstance(leaf, np.ndarray | np.generic):
        return leaf.shape, leaf.dtype
    if isinstance(leaf, bool | int | float | complex):
        return type(leaf)
    raise TypeError(
        f"jdistgrad.jit: an argument (or a leaf of one) is a {type(leaf).__name__}: {leaf!r:.60}. Arguments must be "
        "arrays, numbers, RRefs and containers of them; close over anything else."
    )
