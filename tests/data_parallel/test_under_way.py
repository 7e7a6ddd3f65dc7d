"""How long a program over all devices counts as under way: a state machine, driven with arrays that become ready."""

import time

from jdistgrad.data_parallel.collectives.under_way import Launch


class Under:
    """An array that is being computed until ``ready`` is set."""

    def __init__(self):
        self.ready = False

    def is_ready(self):
        return self.ready


def donated():
    class Deleted:
        def is_ready(self):
            raise RuntimeError("Array has been deleted")

    return Deleted()


def test_time_counts_from_when_the_inputs_are_there():
    computed = Under()
    launch = Launch("step 1", None, 0.05, inputs=[lambda: None, donated, lambda: computed])
    time.sleep(0.1)
    assert not launch.overdue()
    computed.ready = True
    time.sleep(0.1)
    assert launch.overdue()


def test_time_counts_anew_when_the_program_before_has_ended():
    launch = Launch("step 2", None, 0.05)
    time.sleep(0.1)
    assert launch.overdue()
    launch.since = time.monotonic()
    assert not launch.overdue()
    assert not launch.has_ended()
    launch.done = Under()
    assert not launch.has_ended()
    launch.done.ready = True
    assert launch.has_ended()
