"""What runs where a message arrives: functions are recorded and pulled back, a batch of them as one compiled function.

Uses tape and values. Operations say what is to run here, and send it.
"""
