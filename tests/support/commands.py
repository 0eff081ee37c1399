"""Runs commands in the process of a test, as their scripts run them."""

from stepprune_jax.cli.command_line import one_line_errors


def status(name, main, *arguments):
    """Runs a command with one-line errors, and returns its exit status."""
    try:
        with one_line_errors(name):
            return main([*map(str, arguments)]) or 0
    except SystemExit as error:
        return error.code
