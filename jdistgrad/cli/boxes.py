"""The boxes of text that MPI and mpirun print when a rank ends the job, and their removal from a job's error output.

A rank that ends the job says which worker failed, and why. MPI_ABORT and mpirun then add twenty lines that say neither.
"""

NAMED = b"; ending the job"  # what ``abort_job`` prints last
BOXES = b"MPI_ABORT was invoked", b"has exited due to process", b"noticed that process", b"job aborted"
LONGEST = 30  # lines: more are no box


class BoxFilter:
    """A filter of a byte stream. Until the cause of the job's end has passed, everything passes unchanged.

    Attributes:
      named: whether the cause has passed, here or in the stream of another rank.
    """

    def __init__(self) -> None:
        self.named, self._seen = False, b""
        self._held: list[bytes] = []  # the lines of a box, from its upper rule on
        self._partial = b""
        self._zeros = b""  # at the end of what has come

    def __call__(self, data: bytes) -> bytes:
        """Return what to print now. Zeros wait for what follows them: the last byte of prterun's output is one."""
        zeros, text = self._zeros, data.rstrip(b"\0")
        self._zeros = data[len(text) :] if text else zeros + data
        return self._filtered(zeros + text) if text else b""

    def _filtered(self, data: bytes) -> bytes:
        if self.named:
            return self._without_boxes(data)
        self._seen = self._seen[-len(NAMED) :] + data
        if NAMED not in self._seen:
            return data
        self.named = True
        after = len(self._seen) - self._seen.index(NAMED) - len(NAMED)
        return data[: len(data) - after] + self._without_boxes(data[len(data) - after :])

    def end(self) -> bytes:
        """Return what is left at the end of the stream."""
        left, self._held, self._partial = b"".join(self._held) + self._partial, [], b""
        return left

    def _without_boxes(self, data: bytes) -> bytes:
        *lines, self._partial = (self._partial + data).splitlines(keepends=True) or [b""]
        if self._partial.endswith(b"\n"):
            lines, self._partial = [*lines, self._partial], b""
        return b"".join(map(self._line, lines))

    def _line(self, line: bytes) -> bytes:
        if not self._held:
            if not is_rule(line):
                return line
            self._held = [line]
            return b""
        self._held.append(line)
        if not is_rule(line) and len(self._held) < LONGEST:
            return b""
        box, self._held = b"".join(self._held), []
        return b"" if is_rule(line) and any(one in box for one in BOXES) else box


def is_rule(line: bytes) -> bool:
    return len(line) > 20 and not line.strip().strip(b"-=")
