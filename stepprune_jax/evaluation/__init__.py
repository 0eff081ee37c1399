"""Evaluation: one rollout per policy and question, with all budgets as prefixes of one order.

`evaluate.evaluate` runs it. The package `benchmarks` scores the answers and does not import jax;
neither does this file.
"""
