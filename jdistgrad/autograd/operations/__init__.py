"""What a program asks of other workers: to call, to pull a pullback, to fetch, publish, put and take; and their rules.

Uses callee, tape and values. Used by traced calls and by the staged step.
"""
