"""Checkpoints of whole jobs: leaves and files, what each worker does, who saves together, save and restore."""
