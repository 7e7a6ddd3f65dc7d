"""The staged step: a traced program, cut at the wire into pieces and operations that run as their inputs come.

Uses operations and the packages below, and opens a context. Nothing in autograd uses this package.
"""
