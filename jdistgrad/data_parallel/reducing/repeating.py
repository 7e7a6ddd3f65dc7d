"""Operations that are done again when a rank has died meanwhile: the error that says so, and what is put back."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, TypeVar

from jdistgrad.errors import WorkerLostError

F = TypeVar("F", bound=Callable[..., Any])


class UnfinishedError(WorkerLostError):
    """An operation is not whole, since a rank has died. The others have done without it since, and may begin again."""


@dataclasses.dataclass(frozen=True)
class Memory:
    """What an operation changes that must be as before when it is done again.

    Attributes:
      step: the number of the last step.
      states: the hook's states, by plan and bucket.
    """

    step: int
    states: dict[int, dict[int, Any]]


def whole(method: F) -> F:
    """Make a method of a reducer an operation that is whole on every rank, or is done again without those lost."""

    @functools.wraps(method)
    def run(reducer: Any, *args: Any) -> Any:
        while True:
            error, found, before = None, None, reducer.memory()
            try:
                found = method(reducer, *args)
            except Exception as failure:
                error = failure
            if not reducer.vote(error):
                reducer.put_back(before)
            elif error is not None:
                raise error
            else:
                return found

    return run  # type: ignore[return-value]
