"""Schedules of pipelines as pure data, without JAX or workers: orders, checks, forecasts and pictures."""
