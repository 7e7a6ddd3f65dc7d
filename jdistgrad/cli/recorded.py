"""One rank of a recorded job: ``python -m jdistgrad.cli.recorded trace.json script.py [arguments]``."""

import sys

from jdistgrad.cli.programs import Program
from jdistgrad.observe.timeline import timeline

if __name__ == "__main__":
    path, *arguments = sys.argv[1:]
    program = Program(arguments)
    with timeline(path):
        program.run()
