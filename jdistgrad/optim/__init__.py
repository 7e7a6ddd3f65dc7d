"""Optimizers: optax on the owners of the parameters; gradients averaged, and state sharded, over ranks.

Uses autograd and data_parallel. Used by modules; users call it.
"""
