"""How one rank takes steps: the backward pass in pieces, its gradients on their way, compiled steps, uneven inputs.

Uses reducing and what lies below. Used by the public classes.
"""
