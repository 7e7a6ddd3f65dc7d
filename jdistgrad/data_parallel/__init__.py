"""Data parallelism: gradients averaged over ranks, in buckets, while the backward pass still runs."""
