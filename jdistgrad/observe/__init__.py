"""Timelines: recording the events of workers, files for Perfetto, pictures.

Uses events. Users and the command line call it.
"""
