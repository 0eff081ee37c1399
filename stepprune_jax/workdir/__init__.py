"""The folder of a run: description, checkpoints, lock and metrics."""
