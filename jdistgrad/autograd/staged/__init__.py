"""The staged step: a traced program, cut at the wire into pieces and operations that run as their inputs come."""
