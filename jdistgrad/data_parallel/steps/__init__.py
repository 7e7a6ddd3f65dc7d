"""The steps of one rank: the backward pass in segments, the reduction of its gradients, compiled steps, uneven inputs.

Uses reducing and the layers below it. Used by the public classes.
"""
