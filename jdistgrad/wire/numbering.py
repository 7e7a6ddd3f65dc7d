"""Numbers of the frames from one sender to one receiver, by which a frame that comes twice is refused."""

EARLY_KEPT = 4096  # frames ahead of one that is missing; when there are more, the missing frame counts as lost


class Arrivals:
    """The numbers that have arrived from one sender, who counts from 0.

    Several threads send, so that frames may overtake each other a little.
    """

    def __init__(self) -> None:
        self._next = 0  # all numbers below have arrived, or are lost
        self._early = set[int]()

    def is_new(self, number: int) -> bool:
        """Take note of a frame; return whether it is the first of this number."""
        if number == self._next and not self._early:
            self._next += 1
            return True
        if number < self._next or number in self._early:
            return False
        self._early.add(number)
        if self._next not in self._early and len(self._early) > EARLY_KEPT:
            self._next = min(self._early)
        while self._next in self._early:
            self._early.remove(self._next)
            self._next += 1
        return True
