"""The members of a world: peers and their signs of life, termination, shutdown, and the watchdog of collectives.

Uses calls, references and serving. Used by the worker, and by the collectives of data_parallel.
"""
