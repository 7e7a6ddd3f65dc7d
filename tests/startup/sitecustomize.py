"""Leave out of garbage collection what a process has loaded. Python runs this when it starts, if PYTHONPATH names here.

A process of the suites that computes little would spend a third of its time in the collector: on the modules of JAX
while it loads them, and again when Python ends. What the program makes after that is collected as ever.
"""

import gc

LOADED = 215_000  # objects: JAX and jdistgrad are 220,000
USUAL = gc.get_threshold()


def leave_out_what_is_loaded(phase, info):
    gc.callbacks.remove(leave_out_what_is_loaded)
    gc.freeze()
    gc.set_threshold(*USUAL)


gc.callbacks.append(leave_out_what_is_loaded)  # called before the first collection
gc.set_threshold(LOADED)
