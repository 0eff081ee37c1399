import json
import subprocess
import sys

import pytest
import test_mme
from benchmark_files import write_lines
from commands import status
from test_pope import layout

from stepprune_jax.cli import convert as convert_command
from stepprune_jax.cli import score as score_command

# Fails at the first import of anything that computes with a model.
_HIDE = """
import sys
for name in ("jax", "flax", "transformers", "torch", "optax", "matplotlib"):
    sys.modules[name] = None
"""


def test_json_and_summary_say_the_same(tmp_path, capsys):
    answers = write_lines(tmp_path / "a.jsonl", layout(tmp_path))
    out = tmp_path / "o.json"
    score_command.main(
        ["pope", "--data", str(tmp_path), "--answers", str(answers), "--json", str(out)]
    )
    written = json.loads(out.read_text())
    assert list(written) == ["headline", "parts", "warnings"]
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == f"POPE  {written['headline']:.2f}  (100 x mean F1 of the three splits)"
    assert f"  random/f1  {written['parts']['random']['f1']:.2f}" in lines
    assert [line for line in lines if line.startswith("warning: ")] == [
        f"warning: {warning}" for warning in written["warnings"]
    ]


def test_scoring_needs_no_jax(tmp_path):
    answers = write_lines(tmp_path / "a.jsonl", layout(tmp_path))
    program = _HIDE + "from stepprune_jax.cli import convert, score\n"
    program += f"score.main(['pope', '--data', {str(tmp_path)!r}, '--answers', {str(answers)!r}])"
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    assert run.stdout.startswith("POPE  72.22")


@pytest.mark.parametrize("arguments", [["pop"], ["pope", "--answers", "none.jsonl"]])
def test_mistakes_are_one_line(capsys, arguments):
    name = "stepprune-score"
    assert status(name, score_command.main, *arguments) == 2
    error = capsys.readouterr().err
    assert error.startswith(name) and error.count("\n") == 1


def test_converting_says_where(tmp_path, capsys):
    answers = write_lines(tmp_path / "a.jsonl", test_mme.layout(tmp_path))
    options = ["mme", "--data", str(tmp_path), "--answers", str(answers), "--out"]
    convert_command.main([*options, str(tmp_path / "new" / "mine")])
    assert capsys.readouterr().out == f"wrote {tmp_path / 'new' / 'mine'}\n"
    assert len(list((tmp_path / "new" / "mine").iterdir())) == 14
    code = status("convert", convert_command.main, *options, answers)
    error = capsys.readouterr().err
    assert code == 2 and error.count("\n") == 1 and answers.name in error
