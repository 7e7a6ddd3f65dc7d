"""Derivatives across calls: contexts, traced calls, the staged step. README.md: how a derivative crosses the wire.

Uses rpc, and ffi for compiled code. Used by data_parallel, modules and optim.
"""
