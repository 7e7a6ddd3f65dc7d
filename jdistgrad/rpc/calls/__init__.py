"""The caller's side of calls: the table of pending calls, their timeouts and their timeline events.

Uses the mailbox. Used by references, which fetch values by calls, and by everything above.
"""
