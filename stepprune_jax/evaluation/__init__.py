"""Every method on every question: one rollout per policy, all budgets as prefixes of one order.

`evaluate.evaluate` runs it. `benchmarks`, `score` and `convert` score the answers to the public
benchmarks and import no jax: neither does this file.
"""
