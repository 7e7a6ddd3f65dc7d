"""One rank of a recorded job: ``python -m jdistgrad.cli.recorded trace.json script.py [arguments]``."""

import sys

from jdistgrad.cli.programs import UserProgram
from jdistgrad.observe.timeline import in_this_rank, timeline

if __name__ == "__main__":
    path, *arguments = sys.argv[1:]
    program = UserProgram(arguments)
    recorded = timeline()
    try:
        with recorded:
            program.run()
    finally:
        saved = in_this_rank(path)
        torn = saved.with_suffix(".torn")  # where another rank's failure may end this one, it has no part
        recorded.save(torn)
        torn.replace(saved)
