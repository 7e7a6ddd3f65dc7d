"""References to values on other workers: weights and claims, the table of owned values, references in messages.

Uses calls. Used by serving and by everything above.
"""
