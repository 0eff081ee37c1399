"""A run's working folder: description, checkpoints, lock and metrics."""
