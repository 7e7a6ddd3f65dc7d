"""The callee's side of calls: references among arguments, the function, its answer or the exception that travels back.

Uses references and calls. Used by the worker, worlds, the codec and autograd, and by members, which reports the
calls that are still being served.
"""
