"""Looking at an installation and at what a world does: doctor, bench, timelines and their pictures.

Uses the public names and events. The command line calls it.
"""
