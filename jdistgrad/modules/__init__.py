"""Functions and flax modules whose parameters live on another worker.

Uses rpc and autograd. Users call it.
"""
