"""What one worker keeps of a context: recorded pullbacks, contributions to gradients, and their order in the program.

Uses values. Used by the callee, which fills a tape, and by whoever reads gradients.
"""
