"""The tape, one worker's part of a context: recordings, contributions to gradients, and the program's order."""
