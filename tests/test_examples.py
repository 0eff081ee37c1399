"""The examples run, and the docs quote them word for word."""

import pathlib
import re

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[1]
OWN_MODEL = ROOT / "examples" / "own_model.py"


def test_the_docs_quote_the_example():
    page = (ROOT / "docs" / "composing.md").read_text()
    section = page.split("\n## ")[1]
    assert section.startswith("Your own model in ten minutes")
    blocks = re.findall(r"^```python\n(.*?)^```", section, re.DOTALL | re.MULTILINE)
    assert len(blocks) == 5
    source = OWN_MODEL.read_text()
    assert all(block in source for block in blocks)
    assert len(source.splitlines()) < 120


@pytest.mark.slow
def test_a_policy_learns_in_front_of_ones_own_model(capsys):
    """Eight tokens of its choice are worth far more than eight others."""
    namespace = {"__name__": "__main__"}
    exec(compile(OWN_MODEL.read_text(), str(OWN_MODEL), "exec"), namespace)
    *_, exact = capsys.readouterr().out.splitlines()
    kept, other, everything = (
        float(x) for x in re.findall(r"(?:loss|choice|tokens) (\d\.\d+)", exact)
    )
    assert kept < everything + 0.3 * (other - everything)
