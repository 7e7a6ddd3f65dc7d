"""The staged step: a traced program, cut at the wire into pieces and batches of operations, and run as they come.

Uses operations and what lies below, and opens a context. Nothing in autograd uses it.
"""
