"""One rank of a recorded job: ``python -m jdistgrad.recorded trace.json script.py [arguments]``."""

import sys

from jdistgrad.observe.timeline import timeline
from jdistgrad.programs import Program

if __name__ == "__main__":
    path, *arguments = sys.argv[1:]
    program = Program(arguments)
    with timeline(path):
        program.run()
