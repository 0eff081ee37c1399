"""Pretraining as a whole: interrupted, continued, saved, loaded; bad input refused."""

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

from experiments.pretrain.run import FILLED, NOISY, kept_at, pretrain
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


def test_the_steps_show_whole_and_thinned_images():
    run = make_run()
    assert {kept_at(run, "language", step) for step in range(4)} == {None, 4}
    late = [kept_at(run, "noise", step) for step in range(12)]
    assert late[1::2] == [NOISY] * 6 and {*late[::2]} == {None, 4}
    run = make_run(**{"language.filled": 5, "language.whole_steps": 2})
    shown = [kept_at(run, "language", step) for step in range(9)]
    assert shown[:2] == [FILLED] * 2 and {*shown[2:]} == {None, 4}


@pytest.mark.slow
def test_a_stopped_run_resumes_bit_for_bit(data, tmp_path, monkeypatch, capsys):
    def die():
        raise MemoryError

    whole, broken = tmp_path / "whole", tmp_path / "broken"
    assert pretrain(make_run(), whole, data) == whole / "model"
    for line, stage in ((1, "tower"), (2, "language"), (4, "noise")):
        with monkeypatch.context() as patched:
            tiny_run.at_line(patched, line, lambda: os.kill(os.getpid(), signal.SIGINT))
            assert pretrain(make_run(), broken, data) == signal.SIGINT
        assert f"Stopped in {stage}" in capsys.readouterr().out
    with monkeypatch.context() as patched:
        tiny_run.at_line(patched, 1, die)
        with pytest.raises(MemoryError):
            pretrain(make_run(), broken, data)
    gc.collect()  # a file left open would warn here
    (broken / "model.partial").mkdir()  # as one leaves that died while it saved
    (broken / "model.partial" / "model.safetensors").write_bytes(b"half")
    made = pretrain(make_run(), broken, data)
    shown = capsys.readouterr().out
    assert "told" in shown and not any(word in shown for word in ("nan", "alpha", "IoU", "grad"))
    assert metrics(broken) == metrics(whole) and not (broken / "model.partial").exists()
    for name in ("model.safetensors", "config.json", "tokenizer.json"):
        assert (made / name).read_bytes() == (whole / "model" / name).read_bytes()
    before = (made / "model.safetensors").stat().st_mtime_ns
    assert pretrain(make_run(), broken, data) == made
    assert (made / "model.safetensors").stat().st_mtime_ns == before


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"language.batch_size": 5}, "config.language.batch_size"),
        ({"model.vision_heads": 3}, "config.model.vision_width"),
        ({"model.family": "qwen2_5_vl"}, "config.model.feature_layer"),
        ({"language.kept": (4, 10)}, "config.language.kept"),
    ],
)
def test_bad_fields_are_named(change, field):
    with pytest.raises(ValueError, match=f"{field} is .*, expected "):
        make_run(**change)


def with_labels(data, folder, arrays, samples=None):
    """The same images with other labels of patches, or other samples."""
    folder.mkdir()
    text = (data / "train.json").read_text() if samples is None else json.dumps(samples)
    (folder / "train.json").write_text(text)
    (folder / "images").symlink_to(data / "images")
    if arrays:
        np.savez(folder / "train_patches.npz", **arrays)
    return folder


@pytest.mark.slow
def test_a_folder_without_labels_of_patches_trains_the_tower_with_the_rest(data, tmp_path):
    folder = with_labels(data, tmp_path / "d", {})
    made = pretrain(make_run(**{"language.train_tower": True}), tmp_path / "run", folder)
    model = load_vlm(made, dtype=jnp.float32)
    before = init_tower(jax.random.key(1), model.config.vision)
    kernels = [tower["layers"]["mlp"]["up"]["kernel"] for tower in (before, model.params["vision"])]
    assert float(jnp.abs(kernels[1] - kernels[0]).max()) > 1e-4


KIND, SHARE = {"class_kind": np.zeros((6, 9), int)}, {"share_down": np.ones((6, 9))}
TURNS = [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}]


@pytest.mark.parametrize(
    ("arrays", "samples", "change", "message"),
    [
        ({"class_kind": np.zeros((6, 144), int)}, None, {}, r"class_kind is \[6, 144\]"),
        ({"words_b": np.array(["x"])}, None, {}, "words of class_b"),
        ({"value_at": np.array(None)}, None, {}, "not a readable .npz file"),
        ({}, None, {}, "train_tower is False, expected True: .*train_patches.npz"),
        (KIND, None, {"language.filled": 1}, "language.filled is 1, expected none"),
        (SHARE, None, {"language.filled": 1}, "language.filled is 1, expected at least 9"),
        (KIND, None, {"tower.batch_size": 8}, "tower.batch_size is 8, expected at most the 6"),
        (KIND, [{"id": "x", "conversations": TURNS}], {}, "sample 0 has no image"),
    ],
)
def test_data_that_do_not_fit_are_refused(data, tmp_path, arrays, samples, change, message):
    folder = with_labels(data, tmp_path / "d", arrays, samples)
    with pytest.raises(ValueError, match=message):
        pretrain(make_run(**change), tmp_path / "run", folder)
    assert not (tmp_path / "run").exists()
