"""The callee's side: functions are recorded and pulled back, and a bundle may run as one compiled function.

Uses tape and values. Operations choose the functions that run here, and send them.
"""
