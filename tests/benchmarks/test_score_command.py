import json

import pytest
import test_mme
from benchmark_files import write_lines
from commands import status
from processes import run_python
from test_pope import layout

from stepprune_jax.cli import convert as convert_command
from stepprune_jax.cli import score as score_command

# Makes imports of packages that compute with models fail.
_HIDE_PACKAGES = """
import sys
for name in ("jax", "flax", "transformers", "torch", "optax", "matplotlib"):
    sys.modules[name] = None
"""


def test_the_printed_summary_equals_the_json_file(tmp_path, capsys):
    answers = write_lines(tmp_path / "a.jsonl", layout(tmp_path))
    out = tmp_path / "o.json"
    score_command.main(
        ["pope", "--data", str(tmp_path), "--answers", str(answers), "--json", str(out)]
    )
    score = json.loads(out.read_text())
    assert list(score) == ["headline", "parts", "warnings"]
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == f"POPE  {score['headline']:.2f}  (100 x mean F1 of the three splits)"
    assert f"  random/f1  {score['parts']['random']['f1']:.2f}" in lines
    assert [line for line in lines if line.startswith("warning: ")] == [
        f"warning: {warning}" for warning in score["warnings"]
    ]


def test_scoring_needs_no_jax(tmp_path):
    answers = write_lines(tmp_path / "a.jsonl", layout(tmp_path))
    program = _HIDE_PACKAGES + "from stepprune_jax.cli import convert, score\n"
    program += f"score.main(['pope', '--data', {str(tmp_path)!r}, '--answers', {str(answers)!r}])"
    run = run_python("-c", program)
    assert run.returncode == 0, run.stderr
    assert run.stdout.startswith("POPE  72.22")


@pytest.mark.parametrize("arguments", [["pop"], ["pope", "--answers", "none.jsonl"]])
def test_errors_are_one_line(capsys, arguments):
    name = "stepprune-score"
    assert status(name, score_command.main, *arguments) == 2
    error = capsys.readouterr().err
    assert error.startswith(name) and error.count("\n") == 1


def test_the_convert_command_prints_where_it_wrote(tmp_path, capsys):
    answers = write_lines(tmp_path / "a.jsonl", test_mme.layout(tmp_path))
    options = ["mme", "--data", str(tmp_path), "--answers", str(answers), "--out"]
    convert_command.main([*options, str(tmp_path / "new" / "results")])
    assert capsys.readouterr().out == f"wrote {tmp_path / 'new' / 'results'}\n"
    assert len(list((tmp_path / "new" / "results").iterdir())) == 14
    code = status("convert", convert_command.main, *options, answers)
    error = capsys.readouterr().err
    assert code == 2 and error.count("\n") == 1 and answers.name in error
