"""Benchmarks that print ratios measured side by side in one run; compile time is kept apart."""
