"""train.py and eval.py on the toy, as a user runs them."""

import json
import os
import pathlib
import shutil
import subprocess
import sys

import numpy as np
import pytest

ROOT = pathlib.Path(__file__).resolve().parents[1]
SHORT = ["--config.steps=40", "--config.log_every=10", "--config.eval.questions=200"]


def run(program, workdir, *flags):
    environment = {k: v for k, v in os.environ.items() if k != "XLA_FLAGS"}
    command = [sys.executable, program, "--config", "configs/toy.py", "--workdir", str(workdir)]
    return subprocess.run(
        [*command, *SHORT, *flags], cwd=ROOT, env=environment, capture_output=True, text=True
    )


def metrics(workdir):
    return [json.loads(line) for line in (workdir / "metrics.jsonl").read_text().splitlines()]


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    workdir = tmp_path_factory.mktemp("whole")
    done = run("train.py", workdir)
    assert done.returncode == 0, done.stderr
    return workdir


def test_loss_falls_and_says_it_is_a_toy(whole):
    rows = metrics(whole)
    assert [row["step"] for row in rows] == [10, 20, 30, 40]
    assert rows[-1]["loss"] < rows[0]["loss"]
    assert {"k_mean", "k_std", "k_cap", "alpha_in", "alpha_out", "iou", "entropy"} <= set(rows[0])


def test_interrupted_training_resumes_to_the_same_losses(whole, tmp_path):
    # A run of which only the first half is left, and a line that a killed run wrote beyond it.
    for name in ("metrics.jsonl", "checkpoints"):
        source = whole / name
        copy = shutil.copytree if source.is_dir() else shutil.copy
        copy(source, tmp_path / name)
    for step in (30, 40):
        shutil.rmtree(tmp_path / "checkpoints" / str(step))
    resumed = run("train.py", tmp_path)
    assert "Resuming after step 20" in resumed.stdout, resumed.stderr
    assert metrics(tmp_path) == metrics(whole)


def test_eval_writes_a_table_in_which_the_policy_beats_chance(whole):
    done = run("eval.py", whole)
    assert done.returncode == 0, done.stderr
    rows = json.loads((whole / "report" / "table.json").read_text())
    loss = {(r["method"], r["mode"], round(r["mean_k"])): r["loss"] for r in rows}
    assert loss["all tokens", "exact", 48] < 0.2
    assert loss["StepPrune", "exact", 10] < loss["random", "exact", 10]
    assert all(np.isfinite(r["loss"]) for r in rows)


def test_eval_without_training_says_what_to_do(tmp_path):
    done = run("eval.py", tmp_path)
    assert done.returncode != 0
    assert "run train.py with this --workdir first" in done.stderr


def test_a_misspelt_field_is_named(tmp_path):
    done = run("train.py", tmp_path, "--config.optimizer.lrr=1")
    assert done.returncode != 0 and "lrr" in done.stderr and "lr" in done.stderr
