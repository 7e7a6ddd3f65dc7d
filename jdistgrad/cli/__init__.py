"""The command line: starting jobs, checking an installation, measuring it, merging timelines.

It stands above all other layers and may use any of them. Users run it as ``jdistgrad``; no other layer imports it.
"""
