"""The notebooks of docs/tutorials run, and are kept with the outputs of a whole run."""

import json
import pathlib
import re

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[1]
FOLDER = ROOT / "docs" / "tutorials"
NOTEBOOKS = sorted(FOLDER.glob("*.ipynb"))
MOST_BYTES = 600_000


def cells(notebook, kind):
    read = json.loads(notebook.read_text(encoding="utf-8"))
    return [cell for cell in read["cells"] if cell["cell_type"] == kind]


def code(cell):
    """Source of a cell; a command of the notebook's own, as %pip, does nothing."""
    return re.sub(r"^( *)%.*", r"\1pass", "".join(cell["source"]), flags=re.MULTILINE)


def test_there_are_four_and_they_are_small():
    assert len(NOTEBOOKS) == 4
    assert sum(file.stat().st_size for file in FOLDER.iterdir()) < MOST_BYTES


@pytest.mark.parametrize("notebook", NOTEBOOKS, ids=lambda p: p.stem)
def test_outputs_are_those_of_one_run_without_errors(notebook):
    found = cells(notebook, "code")
    assert [cell["execution_count"] for cell in found] == list(range(1, len(found) + 1))
    outputs = [output for cell in found for output in cell["outputs"]]
    assert outputs
    for output in outputs:
        assert output["output_type"] in ("stream", "execute_result", "display_data")
        assert output.get("name") != "stderr", output["text"]
        said = output.get("text", output.get("data", {}).get("text/plain", ""))
        # Paths are those of one machine.
        assert not re.search(r"(?<![\w./:])/\w+/|[A-Z]:\\\\", "".join(said))


@pytest.mark.parametrize("notebook", NOTEBOOKS, ids=lambda p: p.stem)
def test_code_is_python_and_links_lead_somewhere(notebook):
    for number, cell in enumerate(cells(notebook, "code")):
        compile(code(cell), f"{notebook.name}, code cell {number}", "exec")
    text = "\n".join("".join(cell["source"]) for cell in cells(notebook, "markdown"))
    for target in re.findall(r"\]\((?!https?:)([^)#]+)", text):
        assert (FOLDER / target).exists(), f"{notebook.name} links to {target}"


def test_the_one_on_your_own_model_quotes_the_example():
    source = (ROOT / "examples" / "own_model.py").read_text()
    _, *middle, _ = cells(FOLDER / "own-model.ipynb", "code")
    assert len(middle) == 6
    assert all(code(cell) in source for cell in middle)


@pytest.mark.slow
@pytest.mark.parametrize("notebook", NOTEBOOKS, ids=lambda p: p.stem)
def test_they_run(notebook, monkeypatch):
    monkeypatch.delenv("LLAVA", raising=False)
    namespace = {"__name__": "__main__"}
    for number, cell in enumerate(cells(notebook, "code")):
        exec(compile(code(cell), f"{notebook.name}, code cell {number}", "exec"), namespace)
