"""Drawing a saved report again, from the command line."""

import fake_report
import pytest

from stepprune_jax.data.json_files import write_json, write_json_lines
from stepprune_jax.evaluation import report as report_folder
from stepprune_jax.evaluation.records import RECORDS, save_records
from stepprune_jax.visualize.__main__ import main


@pytest.fixture
def report(tmp_path):
    """What an evaluation leaves, with its data beside."""
    data, report = tmp_path / "data", tmp_path / "report"
    made = fake_report.make(data / "images", 12)
    ids = [q.question_id for q in made.questions]
    write_json_lines(
        data / "test.jsonl", [q._asdict() | {"image": q.image.name} for q in made.questions]
    )
    pairs = zip(ids, made.answers, strict=True)
    write_json_lines(
        data / "test_answers.jsonl", [{"question_id": i, "answer": a} for i, a in pairs]
    )
    pairs = zip(ids, made.scenes, strict=True)
    write_json_lines(
        data / "test_scenes.jsonl", [{"question_id": i} | s._asdict() for i, s in pairs]
    )
    report_folder.open_folder(report)
    write_json(report / "table.json", made.table)
    save_records(report / RECORDS, made.records)
    facts = {"data": "data", "grid": [12, 12], "seed": 3, "seconds": 1.5, "model": "/secret/model"}
    report_folder.write_manifest(report, facts)
    return report


@pytest.mark.slow
def test_a_saved_report_is_drawn_again(report, capsys):
    main(["--report", str(report)])
    page = report / "index.html"
    assert capsys.readouterr().out.strip() == str(page)
    text = page.read_text()
    assert "&quot;seed&quot;: 3" in text and "&quot;seconds" not in text and "/secret" not in text
    assert "12 questions about 4 images" in text and "<b>model</b>" in text and "Spearman" in text
    assert (report / "selection.gif").exists()


def test_mistakes_are_told_in_one_line(report, tmp_path, capsys):
    (report / RECORDS).rename(report / "elsewhere")
    for folder in (tmp_path / "none", report):
        with pytest.raises(SystemExit, match="2"):
            main(["--report", str(folder)])
    error = capsys.readouterr().err.splitlines()
    assert len(error) == 2 and "run eval.py first" in error[0] and "no records" in error[1]
    assert all(line.startswith("stepprune_jax.visualize: error: ") for line in error)
