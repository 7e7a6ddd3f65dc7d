"""A rank's part in reductions: shared settings, the meeting, the average, sparse rows, statistics.

Uses hooks, collectives and buckets. Used by steps, the public classes and optim.
"""
