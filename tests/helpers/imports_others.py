"""A user's module that holds functions and modules of the standard library under its own name."""

import functools
import os
import subprocess
from os import system as system
from pickle import loads as loads
from subprocess import Popen as Popen, run as run

table = {"run": subprocess.run}


class Holder:
    table = table
    start = Popen
    system = os.system
    modules = os

    def method(self):
        return "method"

    def __call__(self):
        return "called"


holder = Holder()


@functools.wraps(os.getpgid)
def own(x):
    """Carry the name of another function, as decorated functions do."""
    return x


def doubled(x):
    return 2 * x


own.__qualname__ = "own"
