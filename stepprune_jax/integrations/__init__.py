"""Adapters for other evaluation programs, which users install themselves."""
