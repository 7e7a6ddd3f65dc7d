"""Moving messages between workers. Knows nothing of functions and gradients."""
