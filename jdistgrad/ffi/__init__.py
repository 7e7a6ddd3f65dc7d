"""Python functions called from compiled code, none of which holds a thread that XLA needs.

Uses JAX alone. Used by rpc, autograd and the collectives.
"""
