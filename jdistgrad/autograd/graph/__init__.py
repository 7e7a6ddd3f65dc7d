"""The recorded graph of a context: as send/recv pairs, as text, and as a picture.

Uses tape. Used by contexts.
"""
