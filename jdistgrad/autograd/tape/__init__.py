"""The tape, one worker's part of a context: recorded pullbacks, contributions to gradients, and their program order.

Uses values. Used by the callee, which fills a tape, and by code that reads gradients.
"""
