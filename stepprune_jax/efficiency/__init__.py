"""Cost and savings of pruning from pixels to the first token: the paper's efficiency table."""
