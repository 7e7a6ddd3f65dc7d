"""Schedules of pipelines as pure data: their orders, whether they end, what they cost, and their picture.

Uses neither JAX nor a world. Used by pipeline, which carries schedules out.
"""
