"""The flight recorder (JDISTGRAD_DEBUG=1): what this process did last and awaits, in a file for each process.

Uses the worker and its parts. Used where worlds are opened and where a process ends. The command line reads the files.
"""
