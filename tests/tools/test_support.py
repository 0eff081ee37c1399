"""The support table is what the tests have recorded."""

import json
import re
from types import SimpleNamespace

import pytest
from pages import ROOT
from support_record import SupportRecorder

from stepprune_jax.models.families import FAMILIES
from tools import support

MARK = re.compile(r'mark\.supports\(\s*"(\w+)",\s*"(\w+)"')


def make_report(outcome, *values):
    return SimpleNamespace(
        user_properties=[("supports", list(value)) for value in values],
        when="call",
        passed=outcome == "passed",
        failed=outcome == "failed",
        nodeid="tests/test_x.py::test_y[z]",
    )


def test_results_of_marked_tests_update_the_record(tmp_path):
    record = tmp_path / "support.json"
    old_entry = {"status": "tested", "date": "2026-01-01", "test": "t"}
    record.write_text(json.dumps({"llava": {"serve": old_entry, "int8": old_entry}}))
    recorder = SupportRecorder(record)
    recorder.pytest_runtest_logreport(make_report("passed", ("llava", "answer", "tested")))
    recorder.pytest_runtest_logreport(make_report("passed", ("llava", "answer", "compiled")))
    recorder.pytest_runtest_logreport(make_report("passed", ("qwen3_vl", "train", "compiled")))
    recorder.pytest_runtest_logreport(make_report("failed", ("llava", "int8", "tested")))
    recorder.pytest_sessionfinish(SimpleNamespace(config=SimpleNamespace()))
    families = json.loads(record.read_text())
    assert {*families["llava"]} == {"answer", "serve"}  # What failed is not supported.
    assert families["llava"]["serve"] == old_entry
    assert families["llava"]["answer"]["status"] == "tested"
    assert families["qwen3_vl"]["train"]["test"] == "tests/test_x.py::test_y"
    table = support.format_table(families)
    assert "| LLaVA-1.5 | *tested* 20" in table and "| not yet |" in table
    assert "| *compiled* 20" in table and "*tested* 2026-01-01" in table


def test_the_record_has_the_marked_tests_and_no_others():
    marked = set()
    for file in (ROOT / "tests").rglob("test_*.py"):
        for family, feature in MARK.findall(file.read_text(encoding="utf-8")):
            marked.add((family, feature, str(file.relative_to(ROOT))))
    record = json.loads(support.RECORD.read_text())
    for family, features in record.items():
        for feature, entry in features.items():
            assert (family, feature, entry["test"].partition("::")[0]) in marked
    recorded = {(family, feature) for family in record for feature in record[family]}
    assert recorded == {(family, feature) for family, feature, _ in marked}
    assert {*record} <= {*FAMILIES} and {feature for _, feature in recorded} <= {*support.FEATURES}


def test_the_readme_has_the_table_of_the_record(capsys):
    support.main([])
    assert capsys.readouterr().out in (ROOT / "README.md").read_text(encoding="utf-8")


def test_a_readme_without_a_place_for_the_table_is_refused(tmp_path, monkeypatch):
    readme = tmp_path / "README.md"
    readme.write_text("# Nothing\n")
    monkeypatch.setattr(support, "README", readme)
    with pytest.raises(SystemExit, match="expected 1"):
        support.main(["--write"])
    readme.write_text(f"# Title\n\n{support._MARK}\n| old |\n\nend\n")
    support.main(["--write"])
    text = readme.read_text()
    assert "old" not in text and text.endswith("|\n\nend\n") and "| family |" in text
