"""Opening and closing worlds: under mpirun, as threads of one process, in a notebook; after a fork and at an exit.

Uses the worker. Users call it; nothing else in rpc does.
"""
