"""Code of pages runs, and its names exist; links lead somewhere; the reference is complete."""

import importlib
import re

import pytest
from page_code import problems
from pages import EXAMPLES, HOSTS, NOTEBOOKS, PAGES, ROOT, blocks, cells, prose, shown

SLOW = {".ipynb", ".py"}  # a minute each
SLOW_PAGES = {"composing.md", "hosts.md"}  # which compile 200 programs each
LINK = re.compile(r"\]\((?!https?:)([^)#]+)")


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


@pytest.mark.parametrize("file", [*PAGES, *NOTEBOOKS, *EXAMPLES, *HOSTS], ids=shown)
def test_names_of_code_exist_and_calls_bind(file):
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
def test_a_fault_of_code_is_named(code, problem):
    free = "model = text = None\n"
    (line,) = problems([free + code])
    assert problem in line


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
    for target in LINK.findall(prose(file)):
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
            elif kind in ("autoclass", "autoexception", "autofunction", "py:data"):
                found.append(find(name if name.startswith("stepprune") else module + name))
    return found


@pytest.mark.parametrize("package", ["policy", "pruning", "selectors", "inference", "training"])
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
