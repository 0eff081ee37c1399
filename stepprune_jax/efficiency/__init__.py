"""Measures the cost and savings of pruning up to the first token, as the paper's table does."""
