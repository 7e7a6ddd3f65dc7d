"""References to values on other workers: weights and claims, the table of owned values, references in messages.

Uses what stands beside the folders of rpc. Used by calls and by everything above.
"""
