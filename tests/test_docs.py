"""Every Python block of README and docs runs, page by page in one namespace; no link is dead.

The reference has every public name.
"""

import importlib
import pathlib
import re

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[1]
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md")])
LONG = ("composing.md", "generation.md")
BLOCK = re.compile(r"^```python\n(.*?)^```", re.DOTALL | re.MULTILINE)


@pytest.mark.parametrize(
    "page",
    [
        pytest.param(page, marks=[pytest.mark.slow] * (page.name in LONG))
        for page in PAGES
        if BLOCK.search(page.read_text())
    ],
    ids=lambda p: p.name,
)
def test_code_blocks_run(page):
    text, namespace = page.read_text(), {}
    for match in BLOCK.finditer(text):
        line = text.count("\n", 0, match.start()) + 1
        code = "\n" * line + match.group(1)
        exec(compile(code, str(page), "exec"), namespace)


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_links_lead_somewhere(page):
    for target in re.findall(r"\]\((?!https?:)([^)#]+)", page.read_text()):
        assert (page.parent / target).exists(), f"{page.name} links to {target}"


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


@pytest.mark.parametrize("package", ["policy", "pruning", "inference", "checkpoints", "training"])
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
