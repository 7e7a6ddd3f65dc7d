"""How one rank reduces with the others: settings that all share, the meeting, the average, sparse rows, statistics.

Uses hooks, collectives and buckets. Used by steps.
"""
