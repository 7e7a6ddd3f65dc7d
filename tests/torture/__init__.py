"""Random programs, each compared with the serial one. ``make torture`` runs hundreds in each kind of world.

``programs`` defines programs as plain data. ``generator`` draws a program from a seed, ``interpreter`` runs it serially
or over workers, and ``judging`` compares the results. ``steps`` does the same for data parallelism. ``batch`` runs many
seeds in one process or MPI job, ``watching`` starts batches and watches them, and ``__main__`` counts the failures.
"""
