"""Every Python block of README and docs runs, page by page in one namespace; no link is dead."""

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
