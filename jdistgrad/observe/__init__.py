"""Timelines: recording the events of workers, files for Perfetto, pictures.

Uses events, errors and the launcher's environment. Users and the command line call it.
"""
