"""Checkpoints of whole jobs: leaves and files, who saves together, what each of them does, save and restore.

Read ``checkpoints`` last: it puts the others together.
"""
