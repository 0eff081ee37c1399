"""Moved to `stepprune_jax.studies.paper_tables`."""

if __name__ == "__main__":
    raise SystemExit("moved: use `python -m stepprune_jax.studies.paper_tables`, same arguments")
