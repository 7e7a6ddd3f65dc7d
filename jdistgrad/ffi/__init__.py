"""Calls of Python functions from compiled code that block no thread of XLA's.

Uses JAX alone. Used by rpc, autograd and the collectives.
"""
