"""Opening and closing worlds under mpirun, as threads of one process and in a notebook; forks and exits.

Uses the worker. Users call it; nothing else in rpc does.
"""
