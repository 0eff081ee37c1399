"""Moved to `stepprune_jax.studies.example`."""

if __name__ == "__main__":
    raise SystemExit("moved: use `python -m stepprune_jax.studies.example`, same arguments")
