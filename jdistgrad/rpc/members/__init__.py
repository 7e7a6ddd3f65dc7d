"""Who is in the world: peers, their signs of life, the end of all work, shutdown, and waits for those that never come.

Uses calls, references and serving. Used by the worker.
"""
