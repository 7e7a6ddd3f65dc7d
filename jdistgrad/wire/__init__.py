"""Moving messages between workers. Knows nothing of functions and gradients. README.md says how bytes travel.

Uses MPI, or memory. Used by rpc.
"""
