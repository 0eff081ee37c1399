"""Examples in front of other models, run once for the tests of what they define and say."""

import contextlib
import io
import pathlib
import re
from types import SimpleNamespace

HOSTS = pathlib.Path(__file__).parents[2] / "examples" / "hosts"


def run_example(name):
    """Returns what an example defines and, as `printed`, says."""
    path, names, printed = HOSTS / name, {"__name__": "__main__"}, io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(compile(path.read_text(), str(path), "exec"), names)
    return SimpleNamespace(**names, printed=printed.getvalue())


def numbers(pattern, text):
    return [float(number) for number in re.findall(pattern, text)]
