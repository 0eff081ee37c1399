"""Measures a GPU in one command of a few minutes: `python -m tools.card`."""
