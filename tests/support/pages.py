"""Reads the pages of the documentation: their code blocks, commands and prose."""

import ast
import json
import pathlib
import re
import shlex
from typing import NamedTuple

ROOT = pathlib.Path(__file__).resolve().parents[2]
PAGES = [*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md"), *(ROOT / "experiments").glob("*.md")]
NOTEBOOKS = sorted((ROOT / "docs" / "tutorials").glob("*.ipynb"))
EXAMPLES = sorted((ROOT / "examples").glob("*.py"))
HOSTS = sorted((ROOT / "examples" / "hosts").glob("*.py"))
_PYTHON = re.compile(r"^```python\n(.*?)^```", re.DOTALL | re.MULTILINE)
_SHELL = re.compile(r"^```(?:bash|sh)\n(.*?)^```(?:\n\n```\n(.*?)^```)?", re.DOTALL | re.MULTILINE)


class Command(NamedTuple):
    """A shell command of a page.

    Attributes:
        words: words of the command.
        output: lines of the following output block.
    """

    words: list[str]
    output: list[str]


def shown(file):
    """Returns the path of a page relative to the repository, for messages."""
    return str(file.relative_to(ROOT))


def cells(notebook, kind):
    """Returns the cells of a notebook with a kind, "code" or "markdown"."""
    contents = json.loads(notebook.read_text(encoding="utf-8"))
    return [cell for cell in contents["cells"] if cell["cell_type"] == kind]


def prose(file):
    """Returns the Markdown of a page or notebook."""
    if file.suffix == ".ipynb":
        return "\n\n".join("".join(cell["source"]) for cell in cells(file, "markdown"))
    return file.read_text(encoding="utf-8")


def blocks(file):
    """Returns the Python blocks of a page, notebook or example.

    A block of a page starts with empty lines, so that its line numbers are the page's.
    """
    text = file.read_text(encoding="utf-8")
    if file.suffix == ".py":
        return [text]
    if file.suffix == ".ipynb":  # IPython's %pip is not Python, so `pass` replaces it
        sources = ("".join(cell["source"]) for cell in cells(file, "code"))
        return [re.sub(r"^( *)%.*", r"\1pass", source, flags=re.MULTILINE) for source in sources]
    matches = _PYTHON.finditer(text)
    return ["\n" * (text.count("\n", 0, match.start()) + 1) + match.group(1) for match in matches]


def commands(file):
    """Returns the commands in the shell blocks of a page."""
    result = []
    for block, output in _SHELL.findall(prose(file)):
        pending = ""
        for line in block.replace("\\\n", " ").splitlines():
            pending += line + "\n"
            try:
                words = shlex.split(pending, comments=True)
            except ValueError:  # the quotation continues on the next line
                continue
            pending = ""
            if words:
                result.append(Command(words, output.splitlines()))
    return result


def text_constants(file):
    """Returns the string constants in the Python code of a page or notebook."""
    nodes = (node for block in blocks(file) for node in ast.walk(ast.parse(block)))
    return [n.value for n in nodes if isinstance(n, ast.Constant) and isinstance(n.value, str)]


def drawn_scenes(file):
    """Returns the arguments of a page's calls of `scene_at` with constants only."""
    nodes = (node for block in blocks(file) for node in ast.walk(ast.parse(block)))
    calls = (n for n in nodes if isinstance(n, ast.Call) and ast.unparse(n.func) == "scene_at")
    return [
        tuple(argument.value for argument in call.args)
        for call in calls
        if all(isinstance(argument, ast.Constant) for argument in call.args)
    ]
