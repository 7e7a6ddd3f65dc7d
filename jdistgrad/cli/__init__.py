"""The command line, ``jdistgrad``: start jobs, check an installation, measure it, merge timelines."""
