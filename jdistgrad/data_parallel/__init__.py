"""Data parallelism: gradients averaged over ranks, in buckets, while the backward pass still runs. See README.md.

Uses rpc for local worlds and contexts, and MPI or a mesh. Used by optim and by users.
"""
