"""Which survivors still have to settle their accounts with which lost workers: a state machine without I/O."""


class Settling:
    """The settlements that one owner waits for. It frees no value while any is open."""

    def __init__(self, rank: int, size: int):
        self._others = frozenset(range(size)) - {rank}
        self._lost: set[int] = set()
        self._settled: set[tuple[int, int]] = set()

    def lose(self, peer: int) -> None:
        """Wait for every survivor's settlement with a lost worker, and for none of the lost worker's own."""
        self._lost.add(peer)

    def settled(self, survivor: int, lost: int) -> None:
        self._settled.add((survivor, lost))

    def open(self) -> set[tuple[int, int]]:
        """Return the settlements that have not come: survivor and lost worker."""
        awaited = {(survivor, lost) for survivor in self._others - self._lost for lost in self._lost}
        return awaited - self._settled
