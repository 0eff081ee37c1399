"""A run's working folder: what it is a run of, states to resume from, and metrics."""
