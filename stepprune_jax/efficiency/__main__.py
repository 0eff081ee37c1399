"""Runs the command `stepprune-efficiency` as `python -m stepprune_jax.efficiency`."""

from stepprune_jax.extras import efficiency

if __name__ == "__main__":
    efficiency()
