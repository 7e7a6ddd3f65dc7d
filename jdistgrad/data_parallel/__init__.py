"""Data parallelism: gradients averaged over ranks, in buckets, while the backward pass still runs. See README.md.

Uses autograd for contexts, rpc for worlds, and MPI or a mesh. Used by optim and by users.
"""
