"""StepPrune in the vision stage of sglang-jax, by the example's functions and its output."""

import re
from unittest import mock

import numpy as np
import pytest
import stand_ins
from host_example import run_example

pytest.importorskip("sgl_jax", reason="sglang-jax is not installed: docs/hosts.md says how")
pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]  # warnings of sglang-jax


@pytest.fixture(scope="module")
def example():
    return run_example("sglang_jax.py")


def test_the_signatures_are_those_of_the_package():
    assert stand_ins.changed_signatures("sgl_jax") == []


def requests_of(example):
    """Returns an image, and a request with two images and a video."""
    return [example.draw_request("0", 1), example.draw_request("1", 2, **example.mixed)]


def prune(example, batch, budget):
    """Runs the pruning vision stage, and returns the kept places of each prompt as booleans."""
    example.install(example.policy.with_budget(budget), 64)
    select_tokens, kept = example.pruning.select_tokens, []
    keeps = [np.asarray(request.input_ids) < example.IMAGE for request in batch]

    def record(*arguments):
        kept.append(select_tokens(*arguments))
        return kept[-1]

    with mock.patch.object(example.pruning, "select_tokens", record):
        for request in batch:
            example.pruning.forward(request, None)
    for keep, index in zip(keeps, kept, strict=True):
        keep[np.flatnonzero(~keep)[index]] = True
    return keeps


def rms_norm(x, weight):
    return x / np.sqrt(np.mean(x**2, axis=-1, keepdims=True) + 1e-6) * weight


def rotate(x, positions):
    """Rotates heads [t, h, 128] by three-axis positions [3, t], in sections of 16, 24 and 24."""
    axis = np.repeat([0, 1, 2], [16, 24, 24])
    angle = positions[axis].T * 10000.0 ** (-np.arange(64) / 64)
    cos, sin = np.cos(angle)[:, None], np.sin(angle)[:, None]
    left, right = np.split(x, 2, axis=-1)
    return np.concatenate([left * cos - right * sin, right * cos + left * sin], axis=-1)


def next_word(weights, embeddings, positions, visible):
    """Returns the most probable word after a sequence, in numpy and without a cache.

    Args:
        weights: tensors of the checkpoint.
        embeddings: [t, e] embeddings of the sequence before pruning.
        positions: [3, t] positions.
        visible: [t] false for dropped tokens, to which nothing attends.
    """
    mask = np.tri(len(visible), dtype=bool) & visible
    x = embeddings
    for layer in range(2):
        part = {
            name.removeprefix(f"model.layers.{layer}."): value
            for name, value in weights.items()
            if name.startswith(f"model.layers.{layer}.")
        }
        h = rms_norm(x, part["input_layernorm.weight"])
        q, k, v = (
            (h @ part[f"self_attn.{p}_proj.weight"].T + part[f"self_attn.{p}_proj.bias"]).reshape(
                len(h), -1, 128
            )
            for p in "qkv"
        )
        q, k = rotate(q, positions), rotate(k, positions)
        scores = np.einsum("qhd,kd->hqk", q, k[:, 0]) / np.sqrt(128)
        scores = np.where(mask, scores, -1e30)
        scores = np.exp(scores - scores.max(axis=-1, keepdims=True))
        scores /= scores.sum(axis=-1, keepdims=True)
        mixed = np.einsum("hqk,kd->qhd", scores, v[:, 0]).reshape(len(h), -1)
        x = x + mixed @ part["self_attn.o_proj.weight"].T
        h = rms_norm(x, part["post_attention_layernorm.weight"])
        gate = h @ part["mlp.gate_proj.weight"].T
        gate = gate / (1 + np.exp(-gate)) * (h @ part["mlp.up_proj.weight"].T)
        x = x + gate @ part["mlp.down_proj.weight"].T
    return int(
        np.argmax(rms_norm(x[-1], weights["model.norm.weight"]) @ weights["lm_head.weight"].T)
    )


def test_all_tokens_give_the_hosts_own_ids(example):
    assert "all tokens: ids as sglang-jax's True" in example.printed


@pytest.mark.parametrize("budget", ["1/4", "adaptive"])
def test_generated_ids_are_those_of_hiding_the_other_tokens(example, budget):
    """An independent language model reads the full prompt, and attends to no dropped token."""
    full = requests_of(example)
    for request in full:
        example.plain.forward(request, None)
    keeps = prune(example, requests_of(example), budget)
    generated = example.answer(example.pruning, requests_of(example))
    for request, keep, words in zip(full, keeps, generated, strict=True):
        assert 0 < keep.sum() < len(keep)
        embeddings = np.asarray(request.omni_inputs["multimodal_embedding"], np.float32)
        positions, visible = request.omni_inputs["mrope_positions"], keep
        for word in words:
            assert word == next_word(example.weights, embeddings, positions, visible)
            embedding = example.weights["model.embed_tokens.weight"][word]
            embeddings = np.concatenate([embeddings, embedding[None]])
            following = np.full((3, 1), positions.max() + 1)
            positions = np.concatenate([positions, following], axis=1)
            visible = np.append(visible, True)


def test_each_image_and_video_keeps_its_share(example):
    mixed = requests_of(example)[1]
    prompt = np.asarray(mixed.input_ids)
    keep = prune(example, [mixed], "1/4")[0]
    starts = np.flatnonzero(prompt == example.VISION_START) + 1
    counts = [
        keep[start : start + size].sum() for start, size in zip(starts, (48, 16, 72), strict=True)
    ]
    assert counts == [12, 4, 18]
    assert mixed.input_ids == prompt[keep].tolist()


def test_the_question_decides_what_is_kept(example):
    keeps = prune(example, [example.draw_request("0", 1, seed) for seed in (0, 1)], "1/4")
    assert (keeps[0] != keeps[1]).any()


def test_a_prompt_without_images_is_not_changed(example):
    request = example.draw_request("text", 3, image_grids=())
    request.pixel_values = None
    before = list(request.input_ids)
    example.pruning.forward(request, None)
    assert request.input_ids == before


def test_the_output_names_both_lengths(example):
    lengths = re.findall(r"(\d+) ids of a prompt become (\d+)", example.printed)
    assert [(int(n), int(kept)) for n, kept in lengths] == [(63, 27), (155, 53)]
