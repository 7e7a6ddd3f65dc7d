"""Helpers that tests share: worlds to run in, programs to run there, models, data, jobs."""
