"""Functions and flax modules whose parameters live on another worker."""
