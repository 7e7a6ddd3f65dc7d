"""What runs where a message arrives: its stops, recorded functions and their pullbacks, gradients of values."""
