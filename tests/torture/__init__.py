"""Random programs, each compared with the serial one. ``make torture`` runs hundreds in each kind of world.

``programs`` says what a program is: plain data. ``generator`` draws one from a seed, ``interpreter`` runs one serially
or over workers, ``judging`` compares. ``steps`` does the same for data parallelism. ``batch`` runs many seeds in one
process or MPI job, and ``__main__`` starts batches, watches them and counts.
"""
