"""A run on a tiny LLaVA and a few images, the same shapes in every test."""

import json
import pathlib

import numpy as np
from PIL import Image

from stepprune_jax import configurations
from stepprune_jax.checkpoints.folder import inspect_folder
from stepprune_jax.checkpoints.identity import file_identity
from stepprune_jax.data.json_files import write_json_lines
from stepprune_jax.data.source import training_source
from stepprune_jax.policy import PolicyConfig
from stepprune_jax.selectors import AutoSelectConfig
from stepprune_jax.training.batches import open_batches
from stepprune_jax.training.optimizer import OptimizerSettings
from stepprune_jax.workdir.metrics import MetricsLog

ROOT = pathlib.Path(__file__).resolve().parents[2]
QUESTIONS = ("What is in this picture?", "is this a dog ?", "two or no")
ANSWERS = ("red", "dog", "two", "yes", "no")
# For validation.
ASKED = ("What is in this picture?", "is this a dog ?", "two or no", "red ?", "two ?")
RIGHT = ("red", "no", "two", "yes dog", "no")


def load_config(name):
    """A configuration of the package or of the experiments; a reading may follow a colon."""
    file, _, reading = name.partition(":")
    places = (ROOT / "configs", ROOT / "experiments" / "configs")
    path = next(place / f"{file}.py" for place in places if (place / f"{file}.py").is_file())
    return configurations.load(f"{path}:{reading}")


def write_data(folder, count=6, entries=()):
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


def write_questions(folder):
    """Five questions about three of the images."""
    asked = [
        {"question_id": f"q{i}", "image": f"{i % 3}.png", "text": text}
        for i, text in enumerate(ASKED)
    ]
    right = [{"question_id": f"q{i}", "answer": answer} for i, answer in enumerate(RIGHT)]
    for name, lines in (("validation", asked), ("validation_answers", right)):
        write_json_lines(folder / f"{name}.jsonl", lines)
    return folder


def make_run(model, data, **changes):
    small = {"width": 8, "num_heads": 2, "mlp_ratio": 1, "encoder_layers": 1}
    fields = {
        "model.folder": str(model),
        "model.rows_at_once": 4,
        "data.folder": str(data),
        "data.length_multiple": 64,
        "policy": PolicyConfig(min_tokens=1, **small),  # of nine tokens
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
    fields = {"lr": 1e-3, "final_lr": 1e-4, "warmup": 40, "weight_decay": 1e-4, "clip": 1.0}
    return OptimizerSettings(**fields | {"b1": 0.9, "b2": 0.999, "muon_lr": 0.0} | changes)


def open_tiny(run, workdir):
    data = training_source(run.data, workdir)
    model = inspect_folder(run.model.folder)
    return open_batches(run, data, file_identity(data.file), model, say=lambda text: None)


def metrics(workdir):
    """Lines of a run without what depends on the machine."""
    lines = (workdir / "metrics.jsonl").read_text().splitlines()
    return [{k: v for k, v in json.loads(x).items() if k != "images_per_s"} for x in lines]


def at_line(monkeypatch, number, act):
    """Calls `act` once, after so many lines were written from now on."""
    write, lines = MetricsLog.write, []

    def spy(log, step, *written):
        write(log, step, *written)
        lines.append(step)
        if len(lines) == number:
            act()

    monkeypatch.setattr(MetricsLog, "write", spy)


def looks(workdir):
    lines = (workdir / "validation.jsonl").read_text().splitlines()
    return [{k: v for k, v in json.loads(line).items() if k != "seconds"} for line in lines]
