"""Uses of gradients where they are: a function that runs on the owner of values, with their complete gradients."""

import concurrent.futures
import dataclasses
import functools
import pickle
from collections.abc import Sequence
from typing import Any

import numpy as np

from jdistgrad.autograd.tape.ledger import AS_MADE, REFERENCE, Contribution, Marks, Target, total
from jdistgrad.autograd.tape.tape import current_tape
from jdistgrad.errors import DifferentiationError
from jdistgrad.rpc.by_value import OWN
from jdistgrad.rpc.functions import ServedFunction, describe
from jdistgrad.rpc.worker import current_worker


@dataclasses.dataclass(frozen=True)
class Using(ServedFunction):
    """A function of the gradients of some values, which waits until all contributions to them have come.

    Its first argument holds for each value the marks of these contributions, in parts to be added up. The contributions
    stay in the ledger. The function is one of this package: it is encoded once.
    """

    function: Any
    references: tuple[int, ...]
    values: tuple[str, ...]  # the references, in words

    @property
    def label(self) -> str:
        return describe(self.function)

    @functools.cached_property
    def stream(self) -> bytes:
        return pickle.dumps((self.function, self.references, self.values), protocol=5)

    def __reduce__(self) -> Any:
        return _arrived, (self.stream,)

    def __call__(self, marks: Sequence[Sequence[Any]], *rest: Any) -> Any:
        ledger = current_tape(lambda: self.label).ledger
        targets = zip(self.references, self.summed(marks), strict=True)
        futures = [ledger.take(Target(REFERENCE, reference), mine, keep=True) for reference, mine in targets]
        return self.function([total(self._came(future)) for future in futures], *rest)

    def _came(self, contributions: concurrent.futures.Future[Any]) -> list[Contribution]:
        """Wait for contributions, but not as long as the caller waits for this answer."""
        seconds = current_worker().timeout / 2
        try:
            found: list[Contribution] = contributions.result(seconds)
        except concurrent.futures.TimeoutError as error:
            raise DifferentiationError(
                f"{self.label} has waited {seconds:g} s for contributions that {', '.join(self.values)} did not get. "
                f"{AS_MADE}"
            ) from error
        return found

    def summed(self, marks: Sequence[Sequence[Any]]) -> list[Marks]:
        """Return the sum of the marks of each value. Raises DifferentiationError for a value without contributions."""
        found = list(map(summed, marks))
        for value, mine in zip(self.values, found, strict=True):
            if not all(part >= 0 and part == int(part) for part in mine):
                why = f"{self.label}: this is not the gradient of {value} as it was made. {AS_MADE}"
                raise DifferentiationError(why)
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


@functools.lru_cache(maxsize=4096)
def _arrived(stream: bytes) -> Using:
    return Using(*pickle.loads(stream))


def summed(marks: Sequence[Any]) -> Marks:
    """Return the sum of marks."""
    found = [np.asarray(one).tolist() for one in marks]
    return tuple(found[0] if len(found) == 1 else map(sum, zip(*found, strict=True)))
