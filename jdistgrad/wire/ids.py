"""64-bit identifiers: the worker that made them in the top 16 bits, its own counter in the low 48."""

import itertools

COUNTER_BITS = 48
MAX_WORKERS = 1 << 16


class IdSource:
    """Hands out the identifiers of one worker, in order, from any thread."""

    def __init__(self, rank: int):
        assert 0 <= rank < MAX_WORKERS
        self._base = rank << COUNTER_BITS
        self._counter = itertools.count()

    def next(self) -> int:
        return self._base | next(self._counter)


def worker_of(identifier: int) -> int:
    """The rank of the worker that made an identifier."""
    return identifier >> COUNTER_BITS


def spell(identifier: int) -> str:
    """An identifier as messages print it: worker and counter."""
    return f"{worker_of(identifier)}:{identifier & ((1 << COUNTER_BITS) - 1)}"
