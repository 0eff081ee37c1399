"""Runs as a whole: interrupted anywhere, continued bit for bit, never mixed up."""

import json
import os
import pathlib
import signal
import subprocess
import sys

import numpy as np
import pytest
from processes import free_port, outputs
from tiny_run import at_line, looks, make_run, metrics, write_data

from stepprune_jax import load_policy, testing
from stepprune_jax.training import train
from stepprune_jax.workdir.checkpoints import read_latest

SCRIPT = pathlib.Path(__file__).with_name("one_process.py")


def test_a_run_logs_and_leaves_a_policy(whole):
    rows = metrics(whole)
    assert [row["step"] for row in rows] == [1, 2, 3, 4, 5, 6]
    assert all(row["skipped"] == 0 and row["grad_norm_stop"] < row["grad_norm"] for row in rows)
    # Five of six updates are in the first 70 % of training, in which the stop is not trained.
    assert [row["grad_norm_stop"] > 0 for row in rows] == 5 * [False] + [True]
    saved = load_policy(whole / "policy.safetensors")
    assert saved.config.feature_width == 32 and saved.config.text_width == 48
    assert float(saved.stats.count) == 6 * 9  # six images, however many were asked for


def stop():
    os.kill(os.getpid(), signal.SIGTERM)


def test_a_stopped_run_resumes_as_if_nothing_had_happened(
    world, whole, tmp_path, monkeypatch, capsys
):
    before = signal.getsignal(signal.SIGTERM)
    at_line(monkeypatch, 2, stop)
    assert train(make_run(*world), tmp_path) == signal.SIGTERM
    assert "Stopped after step 2 of 6" in capsys.readouterr().out
    assert signal.getsignal(signal.SIGTERM) == before
    assert not (tmp_path / "policy.safetensors").exists()
    assert train(make_run(*world, **{"data.threads": 5}), tmp_path) == 0  # makes no difference
    assert "Resuming after step 2" in capsys.readouterr().out
    assert metrics(tmp_path) == metrics(whole)
    assert (tmp_path / "policy.safetensors").read_bytes() == (
        whole / "policy.safetensors"
    ).read_bytes()


def test_a_killed_run_resumes_from_its_checkpoint_without_double_lines(
    world, whole, tmp_path, monkeypatch
):
    def die():
        raise MemoryError

    at_line(monkeypatch, 5, die)
    with pytest.raises(MemoryError):
        train(make_run(*world), tmp_path)
    assert [row["step"] for row in metrics(tmp_path)] == [1, 2, 3, 4, 5]
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 6, "lo')  # and cut short in the middle of a line
    train(make_run(*world), tmp_path)
    assert metrics(tmp_path) == metrics(whole)


@pytest.mark.slow
def test_the_running_count_of_a_reading_is_resumed(world, tmp_path, monkeypatch):
    printed = {"policy.soft_budget": "batch_mean", "policy.batch_budget": "own", "steps": 4}
    train(make_run(*world, **printed), tmp_path / "whole")
    at_line(monkeypatch, 2, stop)
    for _ in range(2):
        train(make_run(*world, **printed), tmp_path / "parts")
    assert metrics(tmp_path / "parts") == metrics(tmp_path / "whole")
    state = read_latest(tmp_path / "parts").arrays["state"]
    assert 0 < float(state["method"]) < 9


def test_a_run_whose_output_cannot_be_written_saves_what_is_due(
    world, whole, tmp_path, monkeypatch, capsys
):
    """As with `train.py | tee log`: Ctrl-C ends the reader, too."""

    def fail(*_):
        raise BrokenPipeError

    def close():
        with monkeypatch.context() as patch:
            patch.setattr(os, "write", fail)  # of the handler's line
            stop()
        fail()

    at_line(monkeypatch, 3, close)
    with pytest.raises(BrokenPipeError):
        train(make_run(*world), tmp_path)
    monkeypatch.undo()
    train(make_run(*world), tmp_path)
    assert "Resuming after step 3" in capsys.readouterr().out
    assert metrics(tmp_path) == metrics(whole)


def test_a_damaged_checkpoint_gives_way_to_the_one_before(
    world, whole, tmp_path, monkeypatch, capsys
):
    at_line(monkeypatch, 5, stop)
    train(make_run(*world), tmp_path)
    for path in (tmp_path / "checkpoints" / "5").glob("arrays/**/d/*"):
        path.write_bytes(path.read_bytes()[:-9])
    train(make_run(*world), tmp_path)
    said = capsys.readouterr()
    assert "warning: checkpoint 5 is damaged" in said.err
    assert "Resuming after step 4" in said.out
    assert metrics(tmp_path) == metrics(whole)


@pytest.mark.slow
def test_a_run_resumes_on_other_devices(world, whole, tmp_path, monkeypatch, capsys):
    at_line(monkeypatch, 4, stop)
    train(make_run(*world), tmp_path)
    train(make_run(*world, mesh="data=4,fsdp=2"), tmp_path)
    assert "Resuming after step 4" in capsys.readouterr().out
    one, other = metrics(whole), metrics(tmp_path)
    assert other[:4] == one[:4] and len(other) == len(one) == 6
    for name in one[0]:
        found, expected = ([row[name] for row in rows[4:]] for rows in (other, one))
        np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-7, err_msg=name)


def test_a_finished_run_says_so_and_writes_a_policy_that_is_missing(world, whole, capsys):
    before = {path: path.read_bytes() for path in whole.glob("*.*")}
    train(make_run(*world, log_every=3), whole)
    assert "has finished its 6 steps" in capsys.readouterr().out
    (whole / "policy.safetensors").unlink()
    train(make_run(*world), whole)
    assert {path: path.read_bytes() for path in whole.glob("*.*")} == before
    (whole / "policy.safetensors").write_bytes(b"of an earlier run in this folder")
    os.utime(whole / "policy.safetensors", (0, 0))
    train(make_run(*world), whole)
    assert {path: path.read_bytes() for path in whole.glob("*.*")} == before


def test_another_configuration_model_or_data_is_refused(world, whole, tmp_path):
    with pytest.raises(ValueError, match=r"(?s)config.optimizer.lr: 0.001 -> 0.1.*config.steps: 6"):
        train(make_run(*world, **{"optimizer.lr": 0.1, "steps": 7}), whole)
    other = testing.tiny_llava(tmp_path / "model", text={"num_hidden_layers": 1})
    with pytest.raises(ValueError, match="the frozen model"):
        train(make_run(other, world[1]), whole)
    more = write_data(tmp_path / "data", count=7)
    with pytest.raises(ValueError, match="the training file"):
        train(make_run(world[0], more), whole)
    (tmp_path / "checkpoints" / "3").mkdir(parents=True)
    with pytest.raises(ValueError, match=r"checkpoints but no run.json"):
        train(make_run(*world), tmp_path)


@pytest.mark.slow
def test_two_processes_learn_and_answer_what_one_does(world, whole, tmp_path):
    """Each has two devices that share the weights, and half of the rows."""
    plain = {"JAX_COORDINATOR_ADDRESS": f"localhost:{free_port()}", "JAX_NUM_PROCESSES": "2"}
    changes = json.dumps({"mesh": "data_fsdp", "validation.every": 4, "validation.overlays": 1})
    command = [sys.executable, SCRIPT, "2", *world, tmp_path, changes]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    processes = [
        subprocess.Popen(command, env=os.environ | plain | {"JAX_PROCESS_ID": number}, **pipes)
        for number in "01"
    ]
    printed = outputs(processes)
    assert [process.returncode for process in processes] == [0, 0], "\n".join(printed)
    assert ["step 6/6" in text for text in printed] == [True, False]  # one of them speaks
    assert (tmp_path / "policy.safetensors").is_file()
    one, two = metrics(whole), metrics(tmp_path)
    assert len(one) == len(two) == 6
    for name in one[0]:
        found, expected = ([row[name] for row in rows] for rows in (two, one))
        np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-7, err_msg=name)
    for found, expected in zip(looks(tmp_path), looks(whole), strict=True):
        assert found == pytest.approx(expected, rel=1e-5)
    assert len(list((tmp_path / "overlays").iterdir())) == 2
