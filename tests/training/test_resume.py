"""Runs that are interrupted anywhere continue bit for bit, and are never mixed up."""

import json
import os
import pathlib
import signal
import sys

import numpy as np
import pytest
from processes import run_processes
from tiny_run import (
    assert_same_run,
    call_at_line,
    damage_checkpoint,
    make_run,
    metrics,
    stop_this_process,
    train_to_line,
    validation_rows,
    write_data,
)

from stepprune_jax import load_policy, testing
from stepprune_jax.training import train
from stepprune_jax.workdir.checkpoints import read_latest

SCRIPT = pathlib.Path(__file__).with_name("one_process.py")


def test_a_run_logs_its_updates_and_writes_a_policy(finished_run):
    rows = metrics(finished_run)
    assert [row["step"] for row in rows] == [1, 2, 3, 4, 5, 6]
    assert all(row["skipped"] == 0 and row["grad_norm_stop"] < row["grad_norm"] for row in rows)
    # The first 70 % of training do not train the stop: five of six updates.
    assert [row["grad_norm_stop"] > 0 for row in rows] == 5 * [False] + [True]
    policy = load_policy(finished_run / "policy.safetensors")
    assert policy.config.feature_width == 32 and policy.config.text_width == 48
    assert float(policy.stats.count) == 6 * 9  # all six images, fewer than the settings allow


def test_a_stopped_run_resumes_bit_for_bit(world, finished_run, tmp_path, monkeypatch, capsys):
    handler = signal.getsignal(signal.SIGTERM)
    assert train_to_line(monkeypatch, 2, make_run(*world), tmp_path) == signal.SIGTERM
    assert "Stopped after step 2 of 6" in capsys.readouterr().out
    assert signal.getsignal(signal.SIGTERM) == handler
    assert not (tmp_path / "policy.safetensors").exists()
    # The number of threads may change.
    assert train(make_run(*world, **{"data.threads": 5}), tmp_path) == 0
    assert "Resuming after step 2" in capsys.readouterr().out
    assert_same_run(tmp_path, finished_run)


def test_a_killed_run_writes_no_line_twice(world, finished_run, tmp_path, monkeypatch):
    def fail():
        raise MemoryError

    call_at_line(monkeypatch, 5, fail)
    with pytest.raises(MemoryError):
        train(make_run(*world), tmp_path)
    assert [row["step"] for row in metrics(tmp_path)] == [1, 2, 3, 4, 5]
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 6, "lo')  # a line that was cut
    train(make_run(*world), tmp_path)
    assert metrics(tmp_path) == metrics(finished_run)


@pytest.mark.slow
def test_the_state_of_an_objective_is_resumed(world, tmp_path, monkeypatch):
    changes = {"policy.soft_budget": "batch_mean", "policy.batch_budget": "own", "steps": 4}
    train(make_run(*world, **changes), tmp_path / "uninterrupted")
    train_to_line(monkeypatch, 2, make_run(*world, **changes), tmp_path / "resumed")
    train(make_run(*world, **changes), tmp_path / "resumed")
    assert metrics(tmp_path / "resumed") == metrics(tmp_path / "uninterrupted")
    state = read_latest(tmp_path / "resumed").arrays["state"]
    assert 0 < float(state["method"]) < 9


def test_a_closed_output_loses_no_state(world, finished_run, tmp_path, monkeypatch, capsys):
    """As with `train.py | tee log`: Ctrl-C also ends the reader."""

    def fail(*_):
        raise BrokenPipeError

    def interrupt_and_close():
        with monkeypatch.context() as patch:
            patch.setattr(os, "write", fail)  # the handler's own line
            stop_this_process()
        fail()

    call_at_line(monkeypatch, 3, interrupt_and_close)
    with pytest.raises(BrokenPipeError):
        train(make_run(*world), tmp_path)
    monkeypatch.undo()
    train(make_run(*world), tmp_path)
    assert "Resuming after step 3" in capsys.readouterr().out
    assert metrics(tmp_path) == metrics(finished_run)


def test_a_damaged_checkpoint_is_passed_over(world, finished_run, tmp_path, monkeypatch, capsys):
    train_to_line(monkeypatch, 5, make_run(*world), tmp_path)
    damage_checkpoint(tmp_path, 5)
    train(make_run(*world), tmp_path)
    output = capsys.readouterr()
    assert "warning: checkpoint 5 is damaged" in output.err
    assert "Resuming after step 4" in output.out
    assert metrics(tmp_path) == metrics(finished_run)


def assert_close_metrics(rows, expected_rows):
    for name in expected_rows[0]:
        values, expected = ([row[name] for row in x] for x in (rows, expected_rows))
        np.testing.assert_allclose(values, expected, rtol=1e-5, atol=1e-7, err_msg=name)


@pytest.mark.slow
def test_a_run_resumes_on_other_devices(world, finished_run, tmp_path, monkeypatch, capsys):
    train_to_line(monkeypatch, 4, make_run(*world), tmp_path)
    train(make_run(*world, mesh="data=4,fsdp=2"), tmp_path)
    assert "Resuming after step 4" in capsys.readouterr().out
    rows, expected_rows = metrics(tmp_path), metrics(finished_run)
    assert rows[:4] == expected_rows[:4] and len(rows) == len(expected_rows) == 6
    assert_close_metrics(rows[4:], expected_rows[4:])


def test_a_finished_run_says_so_and_rewrites_a_missing_or_older_policy(world, finished_run, capsys):
    files = {path: path.read_bytes() for path in finished_run.glob("*.*")}
    train(make_run(*world, log_every=3), finished_run)
    assert "has finished its 6 steps" in capsys.readouterr().out
    policy = finished_run / "policy.safetensors"
    for is_missing in (True, False):
        policy.unlink()
        if not is_missing:
            policy.write_bytes(b"of an earlier run in this folder")
            os.utime(policy, (0, 0))
        train(make_run(*world), finished_run)
        assert {path: path.read_bytes() for path in finished_run.glob("*.*")} == files


def test_another_configuration_model_or_file_is_refused(world, finished_run, tmp_path):
    with pytest.raises(ValueError, match=r"(?s)config.optimizer.lr: 0.001 -> 0.1.*config.steps: 6"):
        train(make_run(*world, **{"optimizer.lr": 0.1, "steps": 7}), finished_run)
    other_model = testing.tiny_llava(tmp_path / "model", text={"num_hidden_layers": 1})
    with pytest.raises(ValueError, match="the frozen model"):
        train(make_run(other_model, world[1]), finished_run)
    larger_data = write_data(tmp_path / "data", count=7)
    with pytest.raises(ValueError, match="the training file"):
        train(make_run(world[0], larger_data), finished_run)
    (tmp_path / "checkpoints" / "3").mkdir(parents=True)
    with pytest.raises(ValueError, match=r"checkpoints but no run.json"):
        train(make_run(*world), tmp_path)


@pytest.mark.slow
def test_two_processes_learn_and_answer_as_one_process(world, finished_run, tmp_path):
    """Each process has two devices that share the weights, and half of the rows."""
    changes = json.dumps({"mesh": "data_fsdp", "validation.every": 4, "validation.overlays": 1})
    command = [sys.executable, SCRIPT, "2", *world, tmp_path, changes]
    exit_codes, texts = run_processes([command, command])
    assert exit_codes == [0, 0], "\n".join(texts)
    assert ["step 6/6" in text for text in texts] == [True, False]  # only the main process logs
    assert (tmp_path / "policy.safetensors").is_file()
    rows, expected_rows = metrics(tmp_path), metrics(finished_run)
    assert len(rows) == len(expected_rows) == 6
    assert_close_metrics(rows, expected_rows)
    pairs = zip(validation_rows(tmp_path), validation_rows(finished_run), strict=True)
    for row, expected in pairs:
        assert row == pytest.approx(expected, rel=1e-5)
    assert len(list((tmp_path / "overlays").iterdir())) == 2
