"""Adapters for other programs, each of which must be installed."""
