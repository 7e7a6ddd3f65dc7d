"""Derivatives across calls."""
