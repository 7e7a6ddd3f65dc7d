"""Uses of gradients: functions that owners run with the gradients of their values, once these are complete."""

import contextlib
import contextvars
import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

from jdistgrad._compat import trace_state_clean
from jdistgrad.autograd.callee.contributions import UseStop
from jdistgrad.autograd.operations.calls import where
from jdistgrad.autograd.operations.messages import Crossing
from jdistgrad.autograd.values.holes import Hole, Operand
from jdistgrad.autograd.values.primitive import Batched, Shapes, Started, bind
from jdistgrad.errors import DifferentiationError
from jdistgrad.rpc.functions import describe
from jdistgrad.rpc.rref import RRef
from jdistgrad.rpc.worker import current_worker

# Uses, each with an object that it needs. JAX 0.10 keeps operations for ever, so the object is not in them.
Kept = list[tuple["Use", Any]]

_kept: contextvars.ContextVar[Kept | None] = contextvars.ContextVar("jdistgrad_uses_kept", default=None)


@contextlib.contextmanager
def kept() -> Iterator[Kept]:
    """Trace a block that may use gradients, and list its uses. A run of the block runs all of them, in order."""
    uses: Kept = []
    token = _kept.set(uses)
    try:
        yield uses
    finally:
        _kept.reset(token)


@dataclasses.dataclass(eq=False)
class Use(Crossing):
    """A function of the gradients of some values, which their owner runs. It returns one array.

    Operands: for each value the marks of its contributions, in parts to be added up; then ``others`` arguments.
    ``state``: what identifies the state that the function may change.
    """

    to: int
    used: UseStop
    others: int
    where: str
    state: Any = None
    function = None
    uses_gradients = waits_for_order = needs_context = True

    def __str__(self) -> str:
        return f"{describe(self.used.uses)} to rank {self.to}"

    def start(self, operands: Sequence[Any]) -> Started:
        self.marks(operands)
        return super().start(operands)

    def at_once(self, operands: Sequence[Any]) -> Any:
        self.marks(operands)
        return None if self.to == current_worker().rank else operands

    def marks(self, operands: Sequence[Any]) -> None:
        """Raise DifferentiationError if a value has no contributions."""
        self.used.summed(operands[: sum(self.used.parts)])

    def stop(self) -> tuple[UseStop, list[Any]]:
        return self.used, [Operand(Hole(), (k,)) for k in range(sum(self.used.parts) + self.others)]

    def shapes(self, operands: Shapes) -> Shapes:
        return [self.used.uses.result]

    def batched(self, size: int, batched: Sequence[bool]) -> Batched:
        raise self.misplaced()

    def misplaced(self) -> DifferentiationError:
        return DifferentiationError(
            f"{describe(self.used.uses)} cannot run inside a transformation of JAX (jax.jit, grad, scan ...), which "
            "may drop, repeat or move it. Call it outside, or in a function staged by jd.jit, but not in a loop or a "
            "branch there."
        )


def use(function: Any, gradients: Sequence[tuple[RRef[Any], Any]], others: Sequence[Any]) -> tuple[Use, list[Any]]:
    """Return the use of gradients of values of one owner, and its operands.

    Arguments:
      function: what the owner runs, with a list of the gradients and with ``others``. It tells the shape of the array
        that it returns (``result``).
      gradients: the references, each with the marks of its contributions.
      others: arrays.
    """
    rrefs, owner = [rref for rref, _ in gradients], gradients[0][0].owner.rank
    used = UseStop(function, tuple(rref.id for rref in rrefs), tuple(map(str, rrefs)), (1,) * len(rrefs))
    state = "values of", owner  # uses may change them
    return Use(owner, used, len(others), where(), state), [*(marks for _, marks in gradients), *others]


def use_all(uses: Sequence[tuple[Use, Sequence[Any]]], needs: Any) -> list[Any]:
    """Return the array that each use returns. Called from Python, they run at the same time.

    ``needs``: an object that lives as long as a staged step with these uses.
    """
    if trace_state_clean():
        for one, operands in uses:
            one.marks(operands)  # raises before any owner has begun
        started = [one.start(operands) for one, operands in uses]
        return [one.outputs()[0] for one in started]
    kept = _kept.get()
    if kept is None:
        raise uses[0][0].misplaced()
    kept += [(one, needs) for one, _ in uses]
    return [bind(one, operands)[0] for one, operands in uses]
