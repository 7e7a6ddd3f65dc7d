"""Calls: the caller and its table of pending calls, the server, the exceptions that travel back, and their events.

Uses references. Used by the worker, and by members, who end the calls to those that are lost.
"""
