"""Moved to `stepprune_jax.benchmarks.score`."""

if __name__ == "__main__":
    raise SystemExit("moved: use `python -m stepprune_jax.benchmarks.score`, same arguments")
