"""``python -m jdistgrad``: the command line."""

import sys

from jdistgrad.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
