"""Flags of the commands: one module per command, with a function `parse`.

These modules import neither jax nor a package that does. `cli.start` calls `parse` before it
imports the command, so `--help` and mistakes in the flags need no time. The command calls `parse`
again.
"""
