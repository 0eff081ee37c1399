"""Runs the examples with other models for tests."""

import contextlib
import io
import pathlib
import re
from types import SimpleNamespace

HOSTS = pathlib.Path(__file__).parents[2] / "examples" / "hosts"


def run_example(name):
    """Runs an example, and returns its global names and its output (`printed`)."""
    path, namespace, printed = HOSTS / name, {"__name__": "__main__"}, io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(compile(path.read_text(), str(path), "exec"), namespace)
    return SimpleNamespace(**namespace, printed=printed.getvalue())


def numbers(pattern, text):
    """Returns the numbers that a pattern finds in a text."""
    return [float(number) for number in re.findall(pattern, text)]
