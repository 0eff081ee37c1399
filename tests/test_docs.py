"""Code of the documentation runs, its names and links exist, and the reference is complete."""

import importlib
import re

import pytest
from page_code import problems
from pages import EXAMPLES, HOSTS, NOTEBOOKS, PAGES, ROOT, blocks, cells, prose, shown

SLOW = {".ipynb", ".py"}  # suffixes of files that take a minute each
SLOW_PAGES = {"composing.md", "hosts.md", "troubleshooting.md"}  # each compiles 100 programs
LINK = re.compile(r"\]\((?!https?:)([^)#]+)")


def is_slow(file):
    return file.suffix in SLOW or file.name in SLOW_PAGES


WITH_CODE = [
    pytest.param(file, marks=[pytest.mark.slow] * is_slow(file), id=shown(file))
    for file in (*PAGES, *NOTEBOOKS, *EXAMPLES)
    if blocks(file)
]


@pytest.mark.parametrize("file", WITH_CODE)
def test_code_of_a_page_runs(file, monkeypatch):
    if "import torch" in file.read_text(encoding="utf-8"):
        pytest.importorskip("torch")
    monkeypatch.delenv("LLAVA", raising=False)  # with it, a notebook would load large weights
    namespace = {"__name__": "__main__"}
    for block in blocks(file):
        exec(compile(block, str(file), "exec"), namespace)


@pytest.mark.parametrize("file", [*PAGES, *NOTEBOOKS, *EXAMPLES, *HOSTS], ids=shown)
def test_names_and_calls_in_code_are_valid(file):
    assert problems(blocks(file)) == []


@pytest.mark.parametrize(
    ("code", "problem"),
    [
        ("import stepprune_jax as sp\nsp.generat(model)", "stepprune_jax has no generat"),
        ("from stepprune_jax.pruning import Nothing", "No module named"),
        ("from stepprune_jax.pruning import Grid\nGrid(keep=4)", "argument 'keep'"),
        ("from stepprune_jax import load_policy\nload_policy()", "missing a required argument"),
        (
            "from stepprune_jax import generate\n"
            "for answer in generate(model, [text]):\n    print(answer.times)",
            "Answer has no times",
        ),
        (
            "from stepprune_jax.efficiency.model_shapes import find_backbone\n"
            "from stepprune_jax.flops import vision_flops\n"
            "vision_flops(find_backbone('llava-7b').config, [(24, 24)])",
            "backbone is a ModelConfig, expected Backbone",
        ),
        ("def half(x):\n    return x / two", "two: is not defined"),
    ],
)
def test_faults_in_code_are_reported(code, problem):
    definitions = "model = text = None\n"
    (line,) = problems([definitions + code])
    assert problem in line


@pytest.mark.slow
def test_the_policy_of_the_example_with_a_users_model_learns(capsys):
    """Four selected records answer most questions, and the diagnosis finds no problem."""
    example = ROOT / "examples" / "own_model.py"
    exec(compile(example.read_text(), str(example), "exec"), {"__name__": "__main__"})
    *lines, exact = capsys.readouterr().out.splitlines()
    assert lines.count("no problem found") == 2
    assert float(re.findall(r"(\d+\.\d) % right", exact)[0]) > 85


@pytest.mark.parametrize("file", [*PAGES, *NOTEBOOKS], ids=shown)
def test_targets_of_links_exist(file):
    for target in LINK.findall(prose(file)):
        assert (file.parent / target).exists(), f"{file.name} links to {target}"


@pytest.mark.parametrize("notebook", NOTEBOOKS, ids=shown)
def test_notebooks_contain_the_outputs_of_one_run(notebook):
    code_cells = cells(notebook, "code")
    counts = [cell["execution_count"] for cell in code_cells]
    assert counts == list(range(1, len(code_cells) + 1))
    for output in (output for cell in code_cells for output in cell["outputs"]):
        assert output["output_type"] != "error" and output.get("name") != "stderr"


def find(path):
    """Returns what `from package import name` gives, which may hide a module of that name."""
    module, _, name = path.rpartition(".")
    return getattr(importlib.import_module(module), name)


@pytest.fixture(scope="module")
def documented():
    """Returns the objects that the directives of the reference document."""
    objects = []
    for page in (ROOT / "docs" / "api").glob("*.rst"):
        module = ""
        for kind, name in re.findall(
            r"^\.\. ([a-z:]+):: ([\w.]+)$", page.read_text(), re.MULTILINE
        ):
            if kind == "currentmodule":
                module = f"{name}."
            elif kind in ("autoclass", "autoexception", "autofunction", "py:data"):
                objects.append(find(name if name.startswith("stepprune") else module + name))
    return objects


@pytest.mark.parametrize("package", ["policy", "pruning", "selectors", "inference", "training"])
def test_the_reference_has_every_public_name(package, documented):
    package = importlib.import_module(f"stepprune_jax.{package}")
    for name in package.__all__:
        value = getattr(package, name)
        assert any(value is document for document in documented), name


def test_the_reference_lists_the_names_of_the_top_level_package():
    page = (ROOT / "docs" / "api" / "stepprune_jax.rst").read_text()
    paths = re.findall(r"^   ~([\w.]+)$", page, re.MULTILINE)
    names = {path.rpartition(".")[2]: find(path) for path in paths}
    package = importlib.import_module("stepprune_jax")
    assert names == {name: getattr(package, name) for name in package.__all__}
