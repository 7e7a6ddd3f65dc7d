"""The operations that cross the wire (call, pull, fetch, publish, put, take) and their derivative rules.

Uses callee, tape and values. Used by traced calls and by the staged step.
"""
