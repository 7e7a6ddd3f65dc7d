"""One rank of a recorded job: ``python -m jdistgrad.cli.recorded trace.json script.py [arguments]``."""

import sys

from jdistgrad.cli.programs import UserProgram
from jdistgrad.observe.timeline import timeline

if __name__ == "__main__":
    path, *arguments = sys.argv[1:]
    program = UserProgram(arguments)
    with timeline(path):
        program.run()
