"""Evaluation: answers benchmarks with pruning methods at several budgets, and tabulates the scores.

`cli.evaluate` runs an evaluation: `generate_stage` writes answer files, `scores` scores them, and
`table` builds the results table. The package `benchmarks` scores answers and does not import jax;
neither does this file.
"""
