"""Remote calls: worlds, calls and references, unaware of gradients. README.md follows a call step by step.

Uses wire. Used by everything above; autograd takes over calls on traced values.
"""
