"""Calls of Python functions from compiled code, which hold no thread that XLA needs.

Uses JAX alone. Used by rpc, autograd and the collectives.
"""
