"""Code in README, docs, notebooks and examples runs; no link is dead; the reference is complete."""

import importlib
import json
import pathlib
import re

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[1]
PAGES = [*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md"), *(ROOT / "experiments").glob("*.md")]
NOTEBOOKS = sorted((ROOT / "docs" / "tutorials").glob("*.ipynb"))
EXAMPLES = sorted((ROOT / "examples").glob("*.py"))
SLOW = {".ipynb", ".py"}  # a minute each
SLOW_PAGES = {"composing.md", "hosts.md"}  # which compile 200 programs each
BLOCK = re.compile(r"^```python\n(.*?)^```", re.DOTALL | re.MULTILINE)
LINK = re.compile(r"\]\((?!https?:)([^)#]+)")


def cells(notebook, kind):
    read = json.loads(notebook.read_text(encoding="utf-8"))
    return [cell for cell in read["cells"] if cell["cell_type"] == kind]


def blocks(file):
    """Code of a page, notebook or example, each block on the line where the file has it."""
    text = file.read_text(encoding="utf-8")
    if file.suffix == ".py":
        return [text]
    if file.suffix == ".ipynb":  # a command of the notebook's own, as %pip, does nothing
        sources = ("".join(cell["source"]) for cell in cells(file, "code"))
        return [re.sub(r"^( *)%.*", r"\1pass", source, flags=re.MULTILINE) for source in sources]
    found = BLOCK.finditer(text)
    return ["\n" * (text.count("\n", 0, match.start()) + 1) + match.group(1) for match in found]


def shown(file):
    return str(file.relative_to(ROOT))


def is_slow(file):
    return file.suffix in SLOW or file.name in SLOW_PAGES


WITH_CODE = [
    pytest.param(file, marks=[pytest.mark.slow] * is_slow(file), id=shown(file))
    for file in (*PAGES, *NOTEBOOKS, *EXAMPLES)
    if blocks(file)
]


@pytest.mark.parametrize("file", WITH_CODE)
def test_code_runs(file, monkeypatch):
    if "import torch" in file.read_text(encoding="utf-8"):
        pytest.importorskip("torch")
    monkeypatch.delenv("LLAVA", raising=False)  # the weights of a notebook
    namespace = {"__name__": "__main__"}
    for block in blocks(file):
        exec(compile(block, str(file), "exec"), namespace)


@pytest.mark.slow
def test_a_policy_learns_in_front_of_ones_own_model(capsys):
    """Four records of its choice answer most questions, and the diagnosis finds nothing wrong."""
    example = ROOT / "examples" / "own_model.py"
    exec(compile(example.read_text(), str(example), "exec"), {"__name__": "__main__"})
    *lines, exact = capsys.readouterr().out.splitlines()
    assert lines.count("nothing found") == 2
    assert float(re.findall(r"(\d+\.\d) % right", exact)[0]) > 85


@pytest.mark.parametrize("file", [*PAGES, *NOTEBOOKS], ids=shown)
def test_links_lead_somewhere(file):
    text = file.read_text(encoding="utf-8")
    if file.suffix == ".ipynb":
        text = "".join("".join(cell["source"]) for cell in cells(file, "markdown"))
    for target in LINK.findall(text):
        assert (file.parent / target).exists(), f"{file.name} links to {target}"


@pytest.mark.parametrize("notebook", NOTEBOOKS, ids=shown)
def test_notebooks_are_kept_with_the_outputs_of_one_run(notebook):
    found = cells(notebook, "code")
    assert [cell["execution_count"] for cell in found] == list(range(1, len(found) + 1))
    for output in (output for cell in found for output in cell["outputs"]):
        assert output["output_type"] != "error" and output.get("name") != "stderr"


def find(path):
    """What `import` finds: a function of a package, where a module of the same name is in it."""
    module, _, name = path.rpartition(".")
    return getattr(importlib.import_module(module), name)


@pytest.fixture(scope="module")
def documented():
    """What the directives of the reference name."""
    found = []
    for page in (ROOT / "docs" / "api").glob("*.rst"):
        module = ""
        for kind, name in re.findall(
            r"^\.\. ([a-z:]+):: ([\w.]+)$", page.read_text(), re.MULTILINE
        ):
            if kind == "currentmodule":
                module = f"{name}."
            elif kind in ("autoclass", "autofunction", "py:data"):
                found.append(find(name if name.startswith("stepprune") else module + name))
    return found


@pytest.mark.parametrize("package", ["policy", "pruning", "trained", "inference", "training"])
def test_the_reference_has_every_public_name(package, documented):
    package = importlib.import_module(f"stepprune_jax.{package}")
    exported = {name: getattr(package, name) for name in package.__all__}
    missing = [name for name, it in exported.items() if not any(it is one for one in documented)]
    assert not missing


def test_the_reference_lists_what_the_package_itself_exports():
    page = (ROOT / "docs" / "api" / "stepprune_jax.rst").read_text()
    listed = re.findall(r"^   ~([\w.]+)$", page, re.MULTILINE)
    names = {name.rpartition(".")[2]: find(name) for name in listed}
    package = importlib.import_module("stepprune_jax")
    assert names == {name: getattr(package, name) for name in package.__all__}
