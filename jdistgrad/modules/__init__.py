"""Functions and flax modules whose parameters live on another worker.

Uses rpc, autograd and optim (to restore saved variables). Users call it.
"""
