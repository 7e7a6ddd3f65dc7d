"""The caller's side of calls: the table of those that are pending, their time limits, the events they are told as.

Uses the mailbox. Used by references, whose values are fetched by calls, and by everything above.
"""
