"""Optimizers: optax, where the parameters live."""
