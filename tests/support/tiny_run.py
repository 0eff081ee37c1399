"""A run on a tiny LLaVA and a few images, with the same shapes in every test."""

import json
import os
import pathlib
import signal

import numpy as np
from PIL import Image
from visual import noise

from stepprune_jax import configurations
from stepprune_jax.checkpoints.folder import inspect_folder
from stepprune_jax.checkpoints.identity import file_identity
from stepprune_jax.data.json_files import write_json_lines
from stepprune_jax.data.source import training_source
from stepprune_jax.policy import PolicyConfig
from stepprune_jax.selectors import AutoSelectConfig
from stepprune_jax.training import train
from stepprune_jax.training.batches import open_batches
from stepprune_jax.training.optimizer import OptimizerSettings
from stepprune_jax.workdir.metrics import MetricsLog

ROOT = pathlib.Path(__file__).resolve().parents[2]
QUESTIONS = ("What is in this picture?", "is this a dog ?", "two or no")
ANSWERS = ("red", "dog", "two", "yes", "no")
VALIDATION_QUESTIONS = (*QUESTIONS, "red ?", "two ?")
VALIDATION_ANSWERS = ("red", "no", "two", "yes dog", "no")


def load_config(name):
    """Loads a configuration of the package or of the experiments; a colon precedes an argument."""
    file, _, argument = name.partition(":")
    folders = (ROOT / "configs", ROOT / "experiments" / "configs")
    path = next(path for folder in folders if (path := folder / f"{file}.py").is_file())
    return configurations.load(f"{path}:{argument}")


def write_data(folder, count=6, entries=()):
    """Writes `count` images with two rounds of conversation each, and further entries."""
    random = np.random.default_rng(0)
    (folder / "images").mkdir(parents=True)
    samples = []
    for i in range(count):
        pixels = random.integers(0, 256, (24, 24, 3), np.uint8)
        Image.fromarray(pixels).save(folder / "images" / f"{i}.png")
        turns = []
        for j in range(2):
            mark = "" if turns else "<image>\n"
            turns.append({"from": "human", "value": mark + QUESTIONS[(i + j) % 3]})
            turns.append({"from": "gpt", "value": ANSWERS[(i + 2 * j) % 5]})
        samples.append({"id": f"s{i}", "image": f"{i}.png", "conversations": turns})
    (folder / "train.json").write_text(json.dumps([*samples, *entries]))
    return folder


# (height, width) of images that a model of any image size resizes differently.
IMAGE_SIZES = ((50, 70), (20, 90), (9, 8), (64, 31), (24, 24), (40, 40))


def write_data_of_sizes(folder):
    """Writes data whose images have the sizes of `IMAGE_SIZES`."""
    data = write_data(folder)
    for number, size in enumerate(IMAGE_SIZES):
        noise(number, size).save(data / "images" / f"{number}.png")
    return data


def write_questions(folder):
    """Writes a validation split: five questions about three of the images."""
    questions = [
        {"question_id": f"q{i}", "image": f"{i % 3}.png", "text": text}
        for i, text in enumerate(VALIDATION_QUESTIONS)
    ]
    answers = [
        {"question_id": f"q{i}", "answer": answer} for i, answer in enumerate(VALIDATION_ANSWERS)
    ]
    for name, lines in (("validation", questions), ("validation_answers", answers)):
        write_json_lines(folder / f"{name}.jsonl", lines)
    return folder


def make_run(model, data, **changes):
    """Returns the settings of six updates with a tiny policy."""
    small = {"width": 8, "num_heads": 2, "mlp_ratio": 1, "encoder_layers": 1}
    fields = {
        "model.folder": str(model),
        "model.rows_at_once": 4,
        "data.folder": str(data),
        "data.length_multiple": 64,
        "policy": PolicyConfig(min_tokens=1, **small),  # an image has nine tokens
        "autoselect": AutoSelectConfig(**small),
        "steps": 6,
        "batch_size": 8,
        "log_every": 1,
        "checkpoint_every": 2,
        "mesh": "single",
        "optimizer.warmup": 2,
        "validation.calibrate": 0,
    }
    return load_config("shapes").replace(fields | changes)


def optimizer_settings(**changes):
    """Returns settings of AdamW for tests of the optimizer."""
    return OptimizerSettings(**{"muon_lr": 0.0} | changes)


def open_tiny_batches(run, workdir):
    """Opens the batches of a run."""
    data = training_source(run.data, workdir)
    model = inspect_folder(run.model.folder)
    return open_batches(run, data, file_identity(data.file), model, say=lambda text: None)


def metrics(workdir):
    """Returns the metrics of a run's updates, without the speed."""
    lines = (workdir / "metrics.jsonl").read_text().splitlines()
    rows = [json.loads(line) for line in lines]
    return [{name: row[name] for name in row if name != "images_per_s"} for row in rows]


def validation_rows(workdir):
    """Returns the results of a run's validations, without the time."""
    lines = (workdir / "validation.jsonl").read_text().splitlines()
    rows = [json.loads(line) for line in lines]
    return [{name: row[name] for name in row if name != "seconds"} for row in rows]


def call_at_line(monkeypatch, number, action):
    """Calls `action` once, when the log has written its line of this `number` from now on."""
    write, steps = MetricsLog.write, []

    def write_and_count(log, step, *arguments):
        write(log, step, *arguments)
        steps.append(step)
        if len(steps) == number:
            action()

    monkeypatch.setattr(MetricsLog, "write", write_and_count)


def stop_this_process():
    os.kill(os.getpid(), signal.SIGTERM)


def train_to_line(monkeypatch, number, run, workdir):
    """Trains until a signal stops the run at the line of this number; returns the exit status."""
    call_at_line(monkeypatch, number, stop_this_process)
    return train(run, workdir)


def damage_checkpoint(workdir, step):
    """Truncates the arrays of a checkpoint."""
    for path in (workdir / "checkpoints" / str(step)).glob("arrays/**/d/*"):
        path.write_bytes(path.read_bytes()[:-9])


def read_run_file(workdir):
    return json.loads((workdir / "run.json").read_text())


def assert_same_run(workdir, expected_workdir):
    """Asserts that two runs have equal metrics, and policies of the same bytes."""
    assert metrics(workdir) == metrics(expected_workdir)
    policy, expected = (folder / "policy.safetensors" for folder in (workdir, expected_workdir))
    assert policy.read_bytes() == expected.read_bytes()
