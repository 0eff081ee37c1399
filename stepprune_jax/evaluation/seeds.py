"""Moved to `stepprune_jax.studies.seeds`."""

if __name__ == "__main__":
    raise SystemExit("moved: use `python -m stepprune_jax.studies.seeds`, same arguments")
