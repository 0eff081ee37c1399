"""Pages of the documentation: the code, the commands and the questions that they show."""

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
    """A command of a page: its words, and the lines that the page shows as its output."""

    words: list[str]
    output: list[str]


def shown(file):
    """The name of a page in a message."""
    return str(file.relative_to(ROOT))


def cells(notebook, kind):
    """The cells of a notebook that have a kind, "code" or "markdown"."""
    read = json.loads(notebook.read_text(encoding="utf-8"))
    return [cell for cell in read["cells"] if cell["cell_type"] == kind]


def prose(file):
    """The Markdown of a page or of a notebook."""
    if file.suffix == ".ipynb":
        return "\n\n".join("".join(cell["source"]) for cell in cells(file, "markdown"))
    return file.read_text(encoding="utf-8")


def blocks(file):
    """Python of a page, notebook or example, each block on the line where the file has it."""
    text = file.read_text(encoding="utf-8")
    if file.suffix == ".py":
        return [text]
    if file.suffix == ".ipynb":  # IPython's %pip is replaced by a statement that does nothing
        sources = ("".join(cell["source"]) for cell in cells(file, "code"))
        return [re.sub(r"^( *)%.*", r"\1pass", source, flags=re.MULTILINE) for source in sources]
    matches = _PYTHON.finditer(text)
    return ["\n" * (text.count("\n", 0, match.start()) + 1) + match.group(1) for match in matches]


def commands(file):
    """Reads the commands of a page's shell blocks, each with the output in the next block."""
    result = []
    for block, output in _SHELL.findall(prose(file)):
        pending = ""
        for line in block.replace("\\\n", " ").splitlines():
            pending += line + "\n"
            try:
                words = shlex.split(pending, comments=True)
            except ValueError:  # a quotation that ends on a later line
                continue
            pending = ""
            if words:
                result.append(Command(words, output.splitlines()))
    return result


def text_constants(file):
    """The texts in the Python code of a page or notebook."""
    nodes = (node for block in blocks(file) for node in ast.walk(ast.parse(block)))
    return [n.value for n in nodes if isinstance(n, ast.Constant) and isinstance(n.value, str)]


def drawn_scenes(file):
    """Arguments of the calls of `scene_at` that a page writes out."""
    nodes = (node for block in blocks(file) for node in ast.walk(ast.parse(block)))
    calls = (n for n in nodes if isinstance(n, ast.Call) and ast.unparse(n.func) == "scene_at")
    return [
        tuple(argument.value for argument in call.args)
        for call in calls
        if all(isinstance(argument, ast.Constant) for argument in call.args)
    ]
