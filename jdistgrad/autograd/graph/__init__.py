"""The recorded graph of a context, as pairs of messages, as text and as a picture.

Uses tape. Used by contexts.
"""
