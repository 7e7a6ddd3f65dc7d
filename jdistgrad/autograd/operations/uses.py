"""Uses of gradients: functions that owners run with the gradients of their values, once these are complete."""

import concurrent.futures
import contextlib
import contextvars
import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from jdistgrad._compat import trace_state_clean
from jdistgrad.autograd.callee.stops import CallStop
from jdistgrad.autograd.operations.calls import Call, where
from jdistgrad.autograd.tape.ledger import AS_MADE, REFERENCE, Marks, Target, total
from jdistgrad.autograd.tape.tape import current_tape
from jdistgrad.autograd.values.holes import Hole, Layout, Results
from jdistgrad.autograd.values.primitive import Batched, Started, bind
from jdistgrad.errors import DifferentiationError
from jdistgrad.rpc.by_value import OWN, Cached
from jdistgrad.rpc.functions import ServedFunction, describe
from jdistgrad.rpc.rref import RRef
from jdistgrad.rpc.worker import current_worker


class Using(ServedFunction):
    """A function of the gradients of some values, which waits until all contributions to them have come.

    Its first argument holds for each value the marks of these contributions, in parts to be added up. The contributions
    stay in the ledger. ``content``: the function, which is one of this package, the ids of the references, and their
    names.
    """

    def __init__(self, content: Cached[tuple[Any, tuple[int, ...], tuple[str, ...]]]):
        self._content = content
        self.function, self.references, self.values = content.value

    def __reduce__(self) -> Any:
        return Using, (self._content,)

    @property
    def label(self) -> str:
        return describe(self.function)

    def __call__(self, marks: Sequence[Sequence[Any]], *rest: Any) -> Any:
        ledger = current_tape(lambda: self.label).ledger
        targets = zip(self.references, self.summed(marks), strict=True)
        futures = [ledger.take(Target(REFERENCE, reference), mine, keep=True) for reference, mine in targets]
        seconds = current_worker().timeout / 2  # not as long as the caller waits for this answer
        try:
            gradients = [total(future.result(seconds)) for future in futures]
        except concurrent.futures.TimeoutError as error:
            raise DifferentiationError(
                f"{self.label} has waited {seconds:g} s for contributions that {', '.join(self.values)} did not get. "
                f"{AS_MADE}"
            ) from error
        return self.function(gradients, *rest)

    def summed(self, marks: Sequence[Sequence[Any]]) -> list[Marks]:
        """Return the sum of the marks of each value. Raises DifferentiationError for a value without contributions."""
        found = list[Marks]()
        for value, parts in zip(self.values, marks, strict=True):
            each = [np.asarray(one).tolist() for one in parts]
            mine = tuple(each[0] if len(each) == 1 else map(sum, zip(*each, strict=True)))
            if not all(part >= 0 and part == int(part) for part in mine):
                why = f"{self.label}: this is not the gradient of {value} as it was made. {AS_MADE}"
                raise DifferentiationError(why)
            found.append(mine)
        missing = [value for value, mine in zip(self.values, found, strict=True) if not mine[0]]
        if missing:
            raise DifferentiationError(
                f"{self.label} has no gradient of {', '.join(missing)}: what was differentiated does not depend on it. "
                "Use it there, or leave the reference out. If it is used as a part of another value, which holds the "
                "reference, step with the context: optimizer.step(ctx).",
                missing=missing,
            )
        return found


OWN.add(Using)


# Uses, each with an object that it needs. JAX keeps operations for ever, so the object is not in them.
Kept = list[tuple["Use", Any]]

_kept: contextvars.ContextVar[Kept | None] = contextvars.ContextVar("jdistgrad_uses_kept", default=None)


@contextlib.contextmanager
def kept() -> Iterator[Kept]:
    """Trace a block that may use gradients, and list its uses. Whoever runs it runs all of them, in their order."""
    uses: Kept = []
    token = _kept.set(uses)
    try:
        yield uses
    finally:
        _kept.reset(token)


@dataclasses.dataclass(eq=False)
class Use(Call):
    """A call of a function of the gradients of some values on their owner. It returns one array.

    Operands: for each value the marks of its contributions, in parts to be added up; then other arguments.

    ``parts``: the number of parts for each value. ``state``: what identifies the state that the function changes, or
    None.
    """

    parts: tuple[int, ...] = ()
    state: Any = None
    waits_for_nothing = reads = False
    uses_gradients = waits_for_order = needs_context = True

    def start(self, operands: Sequence[Any]) -> Started:
        self.marks(operands)
        return super().start(operands)

    def at_once(self, operands: Sequence[Any]) -> Any:
        self.marks(operands)
        return None if self.to == current_worker().rank else operands

    def finish(self, arrays: list[Any]) -> list[Any]:
        return self.results.counted(arrays)

    def marks(self, operands: Sequence[Any]) -> list[Marks]:
        """Return the sum of the marks of each value. Raises DifferentiationError for a value without contributions."""
        rest = iter(operands)
        found: list[Marks] = self.function.summed([[next(rest) for _ in range(count)] for count in self.parts])
        return found

    def stop(self) -> CallStop:
        return CallStop(self.arguments.emptied(), (), (), 1, references=True)  # the gradients are in the owner's tape

    def in_parts(self, parts: Sequence[int]) -> "Use":
        others = len(self.arguments.positions) - sum(self.parts)
        return dataclasses.replace(self, arguments=_arguments(parts, others), parts=tuple(parts))

    def batched(self, size: int, batched: Sequence[bool]) -> Batched:
        raise self.misplaced()

    def misplaced(self) -> DifferentiationError:
        return DifferentiationError(
            f"{describe(self.function)} inside a transformation of JAX's (jax.jit, grad, vmap, scan, cond ...), which "
            "may drop it, repeat it or move it. Make it outside of them, or in a function staged by jd.jit, not in a "
            "loop or a branch there."
        )


def _arguments(parts: Sequence[int], others: int) -> Layout:
    """Return the layout of a use's arguments: a list of marks for each value, and other arrays."""
    tree: Any = (([[Hole() for _ in range(count)] for count in parts], *(Hole() for _ in range(others))), {})
    return Layout(tree, tuple(range(sum(parts) + others)))


def use(function: Any, gradients: Sequence[tuple[RRef[Any], Any]], others: Sequence[Any]) -> tuple[Use, list[Any]]:
    """Return the use of gradients of values of one owner, and its operands.

    Arguments:
      function: what the owner runs, with a list of the gradients and with ``others``. It tells the shape of the array
        that it returns (``result``), and whether it changes values of its owner (``changes``).
      gradients: the references, each with the marks of its contributions.
      others: arrays.
    """
    rrefs, owner = [rref for rref, _ in gradients], gradients[0][0].owner.rank
    results, ones = Results(), (1,) * len(rrefs)
    results.learn((Layout(Hole(), (0,)), [function.result]))
    operation = Use(
        owner,
        Using(Cached((function, tuple(rref.id for rref in rrefs), tuple(map(str, rrefs))))),
        _arguments(ones, len(others)),
        results,
        where=where(),
        parts=ones,
        state=("values of", owner) if function.changes else None,
    )
    return operation, [*(marks for _, marks in gradients), *others]


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
