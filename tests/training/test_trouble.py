"""Runs that fail: they say why, keep what they have, and name what to look at."""

import json
import os
import pathlib
import shutil
import signal
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from processes import free_port, outputs
from tiny_run import make_run, metrics, write_data, write_questions

from stepprune_jax.training import run, step, train
from stepprune_jax.training.failures import memory_advice
from stepprune_jax.user_input import UserError
from stepprune_jax.workdir.lock import LOCK_FILE, locked


def test_a_run_without_a_finite_gradient_stops_and_names_the_samples(world, tmp_path, monkeypatch):
    update = step.update

    def spoil(params, *given, **options):
        """From the third batch on."""
        spoil.calls += 1
        if spoil.calls > 2:
            params = jax.tree.map(lambda leaf: leaf * np.nan, params)
        return update(params, *given, **options)

    spoil.calls = 0
    monkeypatch.setattr(step, "update", spoil)
    with pytest.raises(ValueError, match="not finite in 3 updates in a row, up to step 5"):
        train(make_run(*world, max_skipped=3), tmp_path)
    assert [row["skipped_in_row"] for row in metrics(tmp_path)][:5] == [0, 0, 1, 2, 3]
    found = json.loads((tmp_path / "nonfinite.json").read_text())
    assert [batch["step"] for batch in found] == [3, 4, 5]
    samples = found[0]["samples"]
    assert len(samples) == 8
    entries = json.loads((world[1] / "train.json").read_text())
    for sample in samples:
        entry = entries[sample["sample"]]
        assert (sample["id"], sample["image"]) == (entry["id"], entry["image"])
        assert sample["question"] in (0, 1)
    # Every row of an epoch once: 12 questions, of which the first two batches had 16.
    seen = {(s["sample"], s["question"]) for batch in found for s in batch["samples"]}
    assert seen == {(i, j) for i in range(6) for j in range(2)}
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()]  # nothing is lost
    with pytest.raises(ValueError, match="3 updates in a row, up to step 6"):  # no batch is left
        train(make_run(*world, max_skipped=3), tmp_path)
    assert not (tmp_path / "policy.safetensors").exists()
    train(make_run(*world, max_skipped=5), tmp_path)
    assert (tmp_path / "policy.safetensors").exists()


def test_a_run_that_is_stopped_while_it_loads_leaves_at_once(world, tmp_path, monkeypatch, capsys):
    load = run.load_vlm

    def loading(*arguments, **options):
        os.kill(os.getpid(), signal.SIGTERM)
        return load(*arguments, **options)

    monkeypatch.setattr(run, "load_vlm", loading)
    assert train(make_run(*world), tmp_path) == signal.SIGTERM
    assert "Stopped before the first update" in capsys.readouterr().out
    assert not (tmp_path / "metrics.jsonl").exists()


def test_a_folder_in_use_is_refused_before_anything_is_written(world, tmp_path):
    with locked(tmp_path), pytest.raises(ValueError, match="is in use by process") as refused:
        train(make_run(*world), tmp_path)
    assert isinstance(refused.value, UserError)
    assert [path.name for path in tmp_path.iterdir()] == [LOCK_FILE]


def test_a_folder_with_questions_of_its_own_is_refused_before_anything_is_written(world, tmp_path):
    data = write_questions(write_data(tmp_path))
    before = {path: path.read_bytes() for path in data.glob("*.*")}
    with pytest.raises(ValueError, match=r"validation\.jsonl is of no run") as refused:
        train(make_run(world[0], data), data)
    assert isinstance(refused.value, UserError)
    assert {path: path.read_bytes() for path in data.glob("*.*")} == before


@pytest.mark.slow
def test_an_image_that_one_of_two_processes_cannot_read_ends_both(world, tmp_path):
    model, data = world
    other = shutil.copytree(data, tmp_path / "other")
    image = other / "images" / "3.png"
    image.write_bytes(image.read_bytes()[:100])
    plain = {"JAX_COORDINATOR_ADDRESS": f"localhost:{free_port()}", "JAX_NUM_PROCESSES": "2"}
    script = pathlib.Path(__file__).with_name("one_process.py")
    changes = json.dumps({"mesh": "data", "data.stats_images": 0})
    processes = [
        subprocess.Popen(
            [sys.executable, script, "1", model, folder, tmp_path / "run", changes],
            env=os.environ | plain | {"JAX_PROCESS_ID": str(number)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for number, folder in enumerate((data, other))
    ]
    first, second = outputs(processes)
    assert [process.returncode for process in processes] == [1, 1]
    assert "another process of this run failed" in first
    assert "3.png is a damaged image" in second


def exhaust(*_, **__):
    return jax.jit(lambda: jnp.zeros((1 << 46,)))()


def test_too_little_memory_is_reported_in_one_line(world, tmp_path, monkeypatch):
    monkeypatch.setattr(step, "update", exhaust)
    with pytest.raises(ValueError) as error:
        train(make_run(*world), tmp_path)
    said = str(error.value)
    assert said.startswith("out of device memory: lower config.model.rows_at_once (")
    assert "runs 4 rows at a time" in said and "RESOURCE_EXHAUSTED" in said and "\n" not in said


@pytest.mark.parametrize(
    ("changes", "there", "absent"),
    [
        ({"model.rows_at_once": 1}, "model.remat=True", "rows_at_once"),
        ({"model.rows_at_once": 64}, "(the frozen model runs 8 rows at a time)", "runs 64"),
        ({"model.rows_at_once": 0}, "set config.model.rows_at_once (", "lower config.model"),
        ({"model.remat": True, "mesh": "data"}, "mesh=fsdp (shards the weights over 8", "remat"),
        ({}, "set config.model.weights=int8 (", "use more devices"),
        ({"mesh": "fsdp", "batch_size": 16}, "lower config.batch_size (16", "config.mesh"),
        (
            {
                "mesh": "fsdp",
                "model.remat": True,
                "model.dtype": "bfloat16",
                "model.weights": "int8",
            },
            "use more devices",
            "config",
        ),
    ],
)
def test_what_would_help_depends_on_what_is_left_to_do(world, changes, there, absent):
    with pytest.raises(ValueError) as error, memory_advice(make_run(*world, **changes)):
        exhaust()
    said = str(error.value)
    assert there in said and absent not in said


def test_other_errors_of_the_devices_are_left_alone(world):
    with pytest.raises(jax.errors.JaxRuntimeError), memory_advice(make_run(*world)):
        raise jax.errors.JaxRuntimeError("INTERNAL: a bug")
