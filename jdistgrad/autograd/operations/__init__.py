"""The operations that cross the wire, on the caller's side, and their derivative rules."""
