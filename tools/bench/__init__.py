"""Benchmarks that measure ratios side by side in one run, with separate compile times."""
