"""A job that is started again when it fails, so often at most: the decision, and its words."""

import signal
import sys
from collections.abc import Callable

RESTART = "JDISTGRAD_RESTART"  # in the ranks' environment: how often the job has been started again

USAGE = 2  # by convention, the status of a program that refuses its arguments: it would again
ASKED = signal.SIGINT, signal.SIGTERM  # whoever ends a job with these wants it to end


def attempts(run: Callable[[int], tuple[int, bool]], most: int) -> int:
    """Run a job until it ends well, is ended, or has been started again so often; return the last exit status.

    Arguments:
      run: runs the job, given how often it has been started again; returns its exit status, and whether it was ended by
        a signal to this process.
    """
    for number in range(most + 1):
        status, ended = run(number)
        if ended or not failed(status) or number == most:
            break
        print(f"jdistgrad: {described(status)}; starting it again, {number + 1} of {most}", file=sys.stderr, flush=True)
    return status


def failed(status: int) -> bool:
    """Return whether a job that ended with a status may end better when it is started again."""
    return status not in (0, USAGE) and ending_signal(status) not in ASKED


def ending_signal(status: int) -> int | None:
    """Return the signal that ended a rank, or mpirun itself, if it was one."""
    number = -status if status < 0 else status - 128
    return number if number in set(signal.Signals) else None


def described(status: int) -> str:
    number, who = ending_signal(status), "mpirun" if status < 0 else "a rank"
    cause = "" if number is None else f" ({who} was ended by {signal.Signals(number).name})"
    return f"the job ended with status {status}{cause}"
