"""A pretraining run: it resumes, saves a model that loads, and refuses invalid input."""

import gc
import json
import os
import signal

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny_run
from tiny_pretraining import FIELDS

from experiments.pretrain.run import NOISY, kept_at, pretrain
from experiments.pretrain.settings import Pretraining
from experiments.pretrain.structure import init_tower
from experiments.shapes import write_world
from stepprune_jax.checkpoints.load import load_vlm


def make_run(**changes):
    return Pretraining().replace(FIELDS | {"language.lr": 0.05} | changes)


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    folder = tmp_path_factory.mktemp("data") / "w"
    return write_world(folder, seed=1, train=6, validation=0, test=0, patches=True, side=24, grid=3)


def metrics(workdir):
    return [tiny_run.metrics(workdir / stage) for stage in ("tower", "language", "noise")]


def test_updates_show_complete_thinned_and_noisy_images():
    run = make_run()
    assert {kept_at(run, "language", step) for step in range(4)} == {None, 4}
    noise_stage = [kept_at(run, "noise", step) for step in range(12)]
    assert noise_stage[1::2] == [NOISY] * 6 and {*noise_stage[::2]} == {None, 4}


@pytest.mark.slow
def test_a_stopped_run_resumes_bit_for_bit(data, tmp_path, monkeypatch, capsys):
    def die():
        raise MemoryError

    complete, interrupted = tmp_path / "whole", tmp_path / "broken"
    assert pretrain(make_run(), complete, data) == complete / "model"
    for line, stage in ((1, "tower"), (2, "language"), (4, "noise")):
        with monkeypatch.context() as patched:
            tiny_run.at_line(patched, line, lambda: os.kill(os.getpid(), signal.SIGINT))
            assert pretrain(make_run(), interrupted, data) == signal.SIGINT
        assert f"Stopped in {stage}" in capsys.readouterr().out
    with monkeypatch.context() as patched:
        tiny_run.at_line(patched, 1, die)
        with pytest.raises(MemoryError):
            pretrain(make_run(), interrupted, data)
    gc.collect()  # A file that was left open would cause a warning here.
    (interrupted / "model.partial").mkdir()  # A run that died while it saved leaves this folder.
    (interrupted / "model.partial" / "model.safetensors").write_bytes(b"half")
    model_folder = pretrain(make_run(), interrupted, data)
    printed = capsys.readouterr().out
    words = ("told", "nan", "alpha", "IoU", "grad")
    assert [word for word in words if word in printed] == ["told"]
    assert metrics(interrupted) == metrics(complete)
    assert not (interrupted / "model.partial").exists()
    for name in ("model.safetensors", "config.json", "tokenizer.json"):
        assert (model_folder / name).read_bytes() == (complete / "model" / name).read_bytes()
    modified_time = (model_folder / "model.safetensors").stat().st_mtime_ns
    assert pretrain(make_run(), interrupted, data) == model_folder
    assert (model_folder / "model.safetensors").stat().st_mtime_ns == modified_time


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"language.batch_size": 5}, "config.language.batch_size"),
        ({"model.vision_heads": 3}, "config.model.vision_width"),
        ({"model.family": "qwen2_5_vl"}, "config.model.feature_layer"),
        ({"language.kept": (4, 10)}, "config.language.kept"),
    ],
)
def test_an_error_names_the_invalid_field(change, field):
    with pytest.raises(ValueError, match=f"{field} is .*, expected "):
        make_run(**change)


def with_labels(data, folder, arrays, samples=None):
    """Writes a folder with the same images and other labels of patches or other samples."""
    folder.mkdir()
    text = (data / "train.json").read_text() if samples is None else json.dumps(samples)
    (folder / "train.json").write_text(text)
    (folder / "images").symlink_to(data / "images")
    if arrays:
        np.savez(folder / "train_patches.npz", **arrays)
    return folder


@pytest.mark.slow
def test_the_language_stage_can_train_the_tower_without_patch_labels(data, tmp_path):
    folder = with_labels(data, tmp_path / "d", {})
    model_folder = pretrain(make_run(**{"language.train_tower": True}), tmp_path / "run", folder)
    model = load_vlm(model_folder, dtype=jnp.float32)
    initial_tower = init_tower(jax.random.key(1), model.config.vision)
    kernels = [
        tower["layers"]["mlp"]["up"]["kernel"] for tower in (initial_tower, model.params["vision"])
    ]
    assert float(jnp.abs(kernels[1] - kernels[0]).max()) > 1e-4


KIND = {"class_kind": np.zeros((6, 9), int)}
TURNS = [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}]


@pytest.mark.parametrize(
    ("arrays", "samples", "change", "message"),
    [
        ({"class_kind": np.zeros((6, 144), int)}, None, {}, r"class_kind is \[6, 144\]"),
        ({"words_b": np.array(["x"])}, None, {}, "words of class_b"),
        ({"value_at": np.array(None)}, None, {}, "not a readable .npz file"),
        ({}, None, {}, "train_tower is False, expected True, .*train_patches.npz"),
        (KIND, None, {"tower.batch_size": 8}, "tower.batch_size is 8, expected at most the 6"),
        (KIND, [{"id": "x", "conversations": TURNS}], {}, "sample 0 has no image"),
    ],
)
def test_invalid_data_are_refused(data, tmp_path, arrays, samples, change, message):
    folder = with_labels(data, tmp_path / "d", arrays, samples)
    with pytest.raises(ValueError, match=message):
        pretrain(make_run(**change), tmp_path / "run", folder)
    assert not (tmp_path / "run").exists()
