"""What may interrupt a thread wherever it is: a signal's handler that raises."""

import itertools
import sys

from jdistgrad.threads import started


class HandlerError(Exception):
    """What the handler raises."""


def _fail():
    raise HandlerError


def stopped_after(calls, do, stop=_fail):
    """Run ``do`` and stop it at the start of a call in it, where handlers run; return whether that raised."""
    left = iter(range(calls))

    def step(frame, event, arg):
        if next(left, None) is None:
            sys.settrace(before)
            stop()

    before = sys.gettrace()
    sys.settrace(step)
    try:
        do()
    except (HandlerError, KeyboardInterrupt):
        return True
    finally:
        sys.settrace(before)
    return False


def assert_not_left_locked(make, use, use_again):
    """Stop the use of an object at each of its calls: another thread can use the object then."""
    for calls in itertools.count():
        made = make()
        stopped = stopped_after(calls, lambda made=made: use(made))
        other = started(lambda made=made: use_again(made), "other")
        other.join(10)
        assert not other.is_alive(), calls
        if not stopped:
            return
