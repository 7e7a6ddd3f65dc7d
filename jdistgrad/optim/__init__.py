"""Optimizers: optax, where the parameters live; averaged and sharded over ranks.

Uses autograd and data_parallel. Users call it.
"""
