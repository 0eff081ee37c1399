"""Moved to `stepprune_jax.benchmarks.convert`."""

if __name__ == "__main__":
    raise SystemExit("moved: use `python -m stepprune_jax.benchmarks.convert`, same arguments")
