"""Commands, run in this process as their scripts run them."""

from stepprune_jax.cli.command_line import one_line_errors


def status(name, main, *arguments):
    """The exit status of a command whose errors are reported in one line."""
    try:
        with one_line_errors(name):
            return main([*map(str, arguments)]) or 0
    except SystemExit as end:
        return end.code
