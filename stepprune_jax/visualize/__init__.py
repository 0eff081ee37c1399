"""Drawings of kept tokens, and the page of an evaluation."""
