"""Runs the command `stepprune-efficiency` as `python -m stepprune_jax.efficiency`."""

from stepprune_jax.cli.efficiency import command

if __name__ == "__main__":
    command()
