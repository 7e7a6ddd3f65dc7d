"""Numbers of the frames from one sender to one receiver, by which a frame that comes twice is refused."""

FARTHEST = 1 << 16  # how far ahead of the others a frame may be: farther ones are not from this sender's counting


class Arrivals:
    """The numbers that have arrived from one sender, who counts from 0.

    Several threads send, so that frames overtake each other: a large one takes longer than many small ones.
    """

    def __init__(self) -> None:
        self._next = 0
        self._missing = set[int]()  # numbers below ``_next`` that have not arrived

    def is_new(self, number: int) -> bool:
        """Take note of a frame; return whether it is the first of this number."""
        if self._next <= number <= self._next + FARTHEST:
            self._missing.update(range(self._next, number))
            self._next = number + 1
            return True
        if number in self._missing:
            self._missing.remove(number)
            return True
        return number > self._next
