"""Checkpoints of whole jobs: leaves and their descriptions, files and folders, who saves together, save and restore.

Read ``checkpoints`` last: it puts the others together.
"""
