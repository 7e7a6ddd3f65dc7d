"""Calling functions on workers. Knows nothing of gradients."""
