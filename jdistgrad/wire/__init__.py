"""Transports of messages between workers, unaware of functions and gradients. README.md explains how bytes travel.

Uses MPI, or the memory of one process. Used by rpc. Autograd, data_parallel, observe and the
command line use its helpers: arrays, ids, polling, the launcher's environment.
"""
