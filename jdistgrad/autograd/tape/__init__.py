"""The tape, one worker's part of a context: recorded pullbacks, contributions to gradients, and their program order.

Uses values. Used by operations above all, by the callee, which fills a tape, by staged and graph, and by
code that reads gradients.
"""
