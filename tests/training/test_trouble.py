"""Runs that fail keep their state, and name the cause and a remedy."""

import json
import pathlib
import shutil
import signal
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from processes import run_processes
from tiny_run import make_run, metrics, stop_this_process, write_data, write_questions

from stepprune_jax.training import run, step, train
from stepprune_jax.training.failures import memory_advice
from stepprune_jax.user_input import UserError
from stepprune_jax.workdir.lock import LOCK_FILE, locked


def test_a_run_without_a_finite_gradient_stops_and_names_the_samples(world, tmp_path, monkeypatch):
    update, num_updates = step.update, 0

    def update_with_nan(params, *arguments, **options):
        """Replaces the frozen weights by NaN from the third batch on."""
        nonlocal num_updates
        num_updates += 1
        if num_updates > 2:
            params = jax.tree.map(lambda leaf: leaf * np.nan, params)
        return update(params, *arguments, **options)

    monkeypatch.setattr(step, "update", update_with_nan)
    with pytest.raises(ValueError, match="not finite in 3 updates in a row, up to step 5"):
        train(make_run(*world, max_skipped=3), tmp_path)
    assert [row["skipped_in_row"] for row in metrics(tmp_path)][:5] == [0, 0, 1, 2, 3]
    batches = json.loads((tmp_path / "nonfinite.json").read_text())
    assert [batch["step"] for batch in batches] == [3, 4, 5]
    samples = batches[0]["samples"]
    assert len(samples) == 8
    entries = json.loads((world[1] / "train.json").read_text())
    for sample in samples:
        entry = entries[sample["sample"]]
        assert (sample["id"], sample["image"]) == (entry["id"], entry["image"])
        assert sample["question"] in (0, 1)
    # An epoch has 12 questions, and the first two batches have 16 rows. So the next three batches
    # have every question.
    questions = {
        (sample["sample"], sample["question"]) for batch in batches for sample in batch["samples"]
    }
    assert questions == {(i, j) for i in range(6) for j in range(2)}
    assert list((tmp_path / "checkpoints").iterdir())  # the state is saved
    # The resumed run has one batch left.
    with pytest.raises(ValueError, match="3 updates in a row, up to step 6"):
        train(make_run(*world, max_skipped=3), tmp_path)
    assert not (tmp_path / "policy.safetensors").exists()
    train(make_run(*world, max_skipped=5), tmp_path)
    assert (tmp_path / "policy.safetensors").exists()


def test_a_run_that_is_stopped_while_it_loads_has_no_update(world, tmp_path, monkeypatch, capsys):
    load_vlm = run.load_vlm

    def stop_and_load(*arguments, **options):
        stop_this_process()
        return load_vlm(*arguments, **options)

    monkeypatch.setattr(run, "load_vlm", stop_and_load)
    assert train(make_run(*world), tmp_path) == signal.SIGTERM
    assert "Stopped before the first update" in capsys.readouterr().out
    assert not (tmp_path / "metrics.jsonl").exists()


def test_a_folder_in_use_is_refused_before_anything_is_written(world, tmp_path):
    with locked(tmp_path), pytest.raises(ValueError, match="is in use by process") as error:
        train(make_run(*world), tmp_path)
    assert isinstance(error.value, UserError)
    assert [path.name for path in tmp_path.iterdir()] == [LOCK_FILE]


def test_a_folder_with_questions_is_refused_before_anything_is_written(world, tmp_path):
    data = write_questions(write_data(tmp_path))
    files = {path: path.read_bytes() for path in data.glob("*.*")}
    with pytest.raises(ValueError, match=r"validation\.jsonl is of no run") as error:
        train(make_run(world[0], data), data)
    assert isinstance(error.value, UserError)
    assert {path: path.read_bytes() for path in data.glob("*.*")} == files


@pytest.mark.slow
def test_an_image_that_one_of_two_processes_cannot_read_ends_both(world, tmp_path):
    model, data = world
    other_data = shutil.copytree(data, tmp_path / "other")
    image = other_data / "images" / "3.png"
    image.write_bytes(image.read_bytes()[:100])
    script = pathlib.Path(__file__).with_name("one_process.py")
    arguments = tmp_path / "run", json.dumps({"mesh": "data", "data.stats_images": 0})
    command = [sys.executable, script, "1", model]
    exit_codes, (first, second) = run_processes(
        [[*command, folder, *arguments] for folder in (data, other_data)]
    )
    assert exit_codes == [1, 1]
    assert "another process of this run failed" in first
    assert "3.png is a damaged image" in second


def exhaust_memory(*_, **__):
    return jax.jit(lambda: jnp.zeros((1 << 46,)))()


def test_exhausted_memory_is_reported_in_one_line(world, tmp_path, monkeypatch):
    monkeypatch.setattr(step, "update", exhaust_memory)
    with pytest.raises(ValueError) as error:
        train(make_run(*world), tmp_path)
    message = str(error.value)
    assert message.startswith("out of device memory: lower config.model.rows_at_once (")
    assert "runs 4 rows at a time" in message
    assert "RESOURCE_EXHAUSTED" in message and "\n" not in message


ALL_SAVINGS = {"mesh": "fsdp", "model.remat": True, "model.dtype": "bfloat16"}
ALL_SAVINGS |= {"model.weights": "int8"}


@pytest.mark.parametrize(
    ("changes", "advice", "absent"),
    [
        ({"model.rows_at_once": 1}, "model.remat=True", "rows_at_once"),
        ({"model.rows_at_once": 64}, "(the frozen model runs 8 rows at a time)", "runs 64"),
        ({"model.rows_at_once": 0}, "set config.model.rows_at_once (", "lower config.model"),
        ({"model.remat": True, "mesh": "data"}, "mesh=fsdp (shards the weights over 8", "remat"),
        ({}, "set config.model.weights=int8 (", "use more devices"),
        ({"mesh": "fsdp", "batch_size": 16}, "lower config.batch_size (16", "config.mesh"),
        (ALL_SAVINGS, "use more devices", "config"),
    ],
)
def test_the_advice_lists_only_unused_ways_to_save_memory(world, changes, advice, absent):
    with pytest.raises(ValueError) as error, memory_advice(make_run(*world, **changes)):
        exhaust_memory()
    message = str(error.value)
    assert advice in message and absent not in message


def test_other_errors_of_the_devices_are_not_converted(world):
    with pytest.raises(jax.errors.JaxRuntimeError), memory_advice(make_run(*world)):
        raise jax.errors.JaxRuntimeError("INTERNAL: a bug")
