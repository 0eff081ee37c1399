"""The measurement of a GPU: sections run with small shapes, and failures stay in their section."""

import json

import pytest
from commands import status

from tools.card import __main__ as card
from tools.card import host
from tools.card.sections import Section, sections

FIGURE = """
import sys, time
from pathlib import Path
from tools.card import figures
figures.add(Path(sys.argv[1]), "one", ms=[1.23456, 1.0, 2.0])
"""


@pytest.mark.slow
def test_a_section_that_fails_or_hangs_does_not_affect_other_sections(
    tmp_path, monkeypatch, capsys
):
    def make_sections(out, scratch, small):
        code_by_name = {
            "crash": "raise ValueError('broken')",
            "hang": "time.sleep(600)",
            "good": "",
        }
        programs = {
            name: ("-c", FIGURE + end, f"{out / name}.jsonl") for name, end in code_by_name.items()
        }
        seconds = {"hang": 8}
        sections_list = [
            Section(name, seconds.get(name, 60), command) for name, command in programs.items()
        ]
        return [*sections_list, Section("elsewhere", 60, ("-c", ""), needs_gpu=True)]

    monkeypatch.setattr(card, "sections", make_sections)
    monkeypatch.setattr(card, "_MIN_SECONDS", 1)
    monkeypatch.setattr(card, "_DRIVER", tmp_path / "none")
    (tmp_path / "good.jsonl").write_text("of an earlier run")
    card.main(["--out", str(tmp_path)])
    parts = (tmp_path / "summary.md").read_text().split("## ")[1:]
    assert all("| one | 1.235 (1.0 to 2.0) |" in part for part in parts[:3])
    crash, hang, good, elsewhere = (part.partition("\n")[0] for part in parts)
    assert crash.startswith("crash: failed with status 1 after ")
    assert crash.endswith("s: ValueError: broken")
    assert hang == "hang: ended at its limit of 8 s" and good.startswith("good: done in ")
    assert elsewhere == "elsewhere: needs a GPU"
    assert "crash, 1 of 4: 540 s left" in capsys.readouterr().out
    card.main(["--out", str(tmp_path), "--sections", "good", "--minutes", "0.1"])
    assert (tmp_path / "summary.md").read_text() == "## good: no time left\n\n\n"
    assert status("card", card.main, "--out", tmp_path, "--sections", "goods") == 2


def test_statistics_of_graphs_are_read_from_the_log():
    log = ["[0] Execute command buffer; num_executions=1"] * 20
    log += ["x.cc:1] [0] Updated command buffer in 350 μs; num_commands=900\n"] * 10
    log += ["x.cc:1] [0] Recorded command buffer in 9999 μs; num_commands=900\n"]
    counts = {"graph_launches": 2, "graph_updates": 1, "update_us": 350, "updated_commands": 900}
    assert host.graph_statistics(log) == counts
    assert host.graph_statistics([]) == dict.fromkeys(counts, 0)


def test_the_first_sections_fit_into_the_default_time(tmp_path):
    (tmp_path / "out").mkdir()
    all_sections = sections(tmp_path / "out", tmp_path, small=False)
    names = [section.name for section in all_sections]
    assert names[:4] == ["rows", "programs", "host", "products"]
    assert sum(section.seconds for section in all_sections[:6]) < 9 * 60
    (tests,) = (section for section in all_sections if section.needs_gpu)
    assert "tests/training/test_on_a_gpu.py" in tests.command


@pytest.mark.slow
def test_every_section_has_a_result_or_a_reason(tmp_path, monkeypatch):
    flags = "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true"
    monkeypatch.setenv("XLA_FLAGS", flags)
    card.main(["--out", str(tmp_path), "--small", "--minutes", "30"])
    parts = (tmp_path / "summary.md").read_text().split("## ")[1:]
    text_by_section = dict(part.split(": ", 1) for part in parts)
    names = [section.name for section in sections(tmp_path, tmp_path, small=True)]
    assert [*text_by_section] == names
    for name, row in {
        "rows": "| stepprune@4 group=4 |",
        "programs": ".jit_decode |",
        "host": "| CUDA graphs | needs a GPU |",
        "products": "| 704 x 96 x 48, ",
        "sampled": "| batch 4 |",
        "gated": "| batch 4 |",
        "int8": "| stepprune@4 |",
        "batch8": "| visionzip@4 |",
    }.items():
        text = text_by_section[name]
        assert text.startswith("done in ") and row in text, text
    assert "attention 'cudnn' needs a GPU" in text_by_section["cudnn"]
    assert text_by_section["tests"].startswith(("needs a GPU", "done in"))
    (rows,) = json.loads((tmp_path / "rows.json").read_text())["batches"].values()
    assert len(rows) == 4
