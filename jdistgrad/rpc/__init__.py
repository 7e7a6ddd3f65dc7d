"""Calling functions on workers: worlds, calls, references. Knows nothing of gradients. README.md says how a call goes.

Uses wire. Used by everything above; autograd takes over calls of which JAX traces something.
"""
