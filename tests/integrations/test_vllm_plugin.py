"""Parts of the vLLM plugin that need no vLLM; `make test-serving` tests it inside vLLM."""

import contextlib
import dataclasses
import json
import sys
import types
from typing import NamedTuple

import numpy as np
import pytest
import torch
from tiny_llava_next import tiny_llava_next
from tiny_qwen import qwen_tokenizer

from stepprune_jax import testing
from stepprune_jax.checkpoints.load import load_vlm
from stepprune_jax.checkpoints.shipped import SHAPES_MODEL, SHAPES_QWEN
from stepprune_jax.data.prompts import IMAGE_MARK, question_ids
from stepprune_jax.integrations import vllm_plugin
from stepprune_jax.integrations.vllm_plugin import positions
from stepprune_jax.integrations.vllm_plugin.questions import find_question
from stepprune_jax.integrations.vllm_plugin.settings import read_settings
from stepprune_jax.models.llava import Llava
from stepprune_jax.models.qwen2_5_vl import Qwen2_5_VL

IMAGE, VIDEO = 90, 91
IMAGE_TOKENS = {"qwen2_5_vl": "<|image_pad|>", "llava": IMAGE_MARK}


@dataclasses.dataclass(frozen=True)
class Place:
    """Placeholders of an item, as vLLM describes them."""

    offset: int
    length: int


@dataclasses.dataclass(frozen=True)
class Item:
    """An image or a video of a prompt, with temporal patches, rows and columns of its tokens."""

    modality: str
    mm_position: Place
    grid: tuple[int, int, int]


class PrunedPrompt(NamedTuple):
    """A prompt of text, an image, text, a video, text, an image and text."""

    ids: list[int]
    items: list[Item]
    kept: list[np.ndarray]
    expected: np.ndarray


def unpruned_positions(ids, items):
    """vLLM's rule for Qwen2.5-VL: an item extends by its longest axis."""
    columns, end, start = [], 0, 0
    for item in items:
        offset = item.mm_position.offset
        columns.append(np.broadcast_to(np.arange(start, start + offset - end), (3, offset - end)))
        start += offset - end
        columns.append(start + np.indices(item.grid).reshape(3, -1))
        start, end = start + max(item.grid), offset + int(np.prod(item.grid))
    columns.append(np.broadcast_to(np.arange(start, start + len(ids) - end), (3, len(ids) - end)))
    actual = torch.from_numpy(np.concatenate(columns, 1))
    return actual, int(actual.max()) + 1 - len(ids)


def pruned_prompt():
    """Builds a prompt whose items keep random tokens, and the positions that they should have."""
    random = np.random.default_rng(1)
    ids, items, kept, all_ids, all_items, columns = [], [], [], [], [], []
    for grid in ((1, 4, 2), (270, 2, 3), (1, 300, 3)):
        size, is_image = int(np.prod(grid)), grid[0] == 1
        places = np.sort(random.choice(size, size // 3, replace=False))
        for prompt, length, prompt_items in (
            (all_ids, size, all_items),
            (ids, len(places), items),
        ):
            prompt += [1, 2, 3]
            place = Place(len(prompt), length)
            prompt_items.append(Item("image" if is_image else "video", place, grid))
            prompt += [IMAGE if is_image else VIDEO] * length
        start = len(all_ids) - size
        columns += [*range(start - 3, start), *(start + places).tolist()]
        kept.append(places)
    columns += range(len(all_ids), len(all_ids) + 2)
    full, _ = unpruned_positions([*all_ids, 4, 5], all_items)
    return PrunedPrompt([*ids, 4, 5], items, kept, full[:, columns].numpy())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_kept_tokens_have_the_positions_of_the_unpruned_items(dtype):
    prompt = pruned_prompt()
    actual, delta = positions.prompt_positions(
        unpruned_positions,
        prompt.ids,
        prompt.items,
        lambda item: [IMAGE if item.modality == "image" else VIDEO] * int(np.prod(item.grid)),
    )
    is_visual = torch.isin(torch.tensor(prompt.ids), torch.tensor([IMAGE, VIDEO]))
    # The positions of text are final before the items are encoded.
    assert (actual.numpy() == prompt.expected)[:, ~is_visual.numpy()].all()
    channels = []
    for item, places in zip(prompt.items, prompt.kept, strict=True):
        tokens = torch.zeros(item.mm_position.length, 7, dtype=dtype)
        offsets = np.indices(item.grid).reshape(3, -1)[:, places]
        with_channels = positions.append_offsets(tokens, torch.from_numpy(offsets))
        assert with_channels.dtype == dtype and (with_channels[:, :7] == 0).all()
        channels.append(with_channels[:, 7:])
    at_once = positions.add_offsets(actual, is_visual, 0, channels)
    np.testing.assert_array_equal(at_once, prompt.expected)
    assert delta == prompt.expected.max() + 1 - len(prompt.ids)
    # vLLM computes long prompts in parts, and some parts twice.
    all_channels, rank = torch.cat(channels), torch.cumsum(is_visual, 0) - is_visual.long()
    for first, end in ((0, 4), (4, 9), (4, 9), (8, 200), (100, 300), (300, len(prompt.ids))):
        window = all_channels[rank[first] : rank[end - 1] + is_visual[end - 1]]
        actual = positions.add_offsets(actual, is_visual, first, [window])
    np.testing.assert_array_equal(actual, prompt.expected)


def test_the_channels_hold_the_times_of_long_videos():
    offsets = torch.tensor([[0, 255, 256, 200_003], [0, 1, 65_535, 65_536], [1, 2, 3, 4]])
    with_channels = positions.append_offsets(torch.zeros(4, 0, dtype=torch.bfloat16), offsets)
    pending = torch.tensor([[9] * 4, [9] * 4, [-1] * 4])
    actual = positions.add_offsets(pending, torch.ones(4, dtype=torch.bool), 0, [with_channels])
    np.testing.assert_array_equal(actual, 9 + offsets)


@pytest.mark.parametrize("tokenizer_name", ["qwen", "tiny llava", "shapes", "shapes_qwen"])
def test_the_question_is_found_in_the_ids_of_a_prompt(tokenizer_name):
    """The ids equal those that the pruner reads in `generate`, in a conversation as well."""
    turns = ["What is red?", "no", "two dog is there"]
    if tokenizer_name.startswith("shapes"):
        folder = SHAPES_MODEL if tokenizer_name == "shapes" else SHAPES_QWEN
        model = load_vlm(folder, use="embeddings", progress=False)
        tokenizer, family = model.tokenizer, type(model.backbone)
        del turns[1:]  # the template of later turns is not in the vocabulary
    elif tokenizer_name == "qwen":
        tokenizer, family = qwen_tokenizer(), Qwen2_5_VL
    else:
        tokenizer = testing.tiny_tokenizer()
        family = Llava
    marked = [family.place_images(turns[0], 1), *turns[1:]]
    text = family.conversation(marked).replace(IMAGE_MARK, IMAGE_TOKENS[family.name])
    ids = tokenizer(text, add_special_tokens=False).input_ids
    assert find_question(tokenizer, list(ids)) == question_ids(tokenizer, turns)


@pytest.fixture
def setting(monkeypatch):
    """Sets the plugin's environment variable, and pretends that vLLM is installed."""

    def run(text, version="0.32.0+cpu"):
        monkeypatch.setenv(vllm_plugin.VARIABLE, text)
        architectures = {}
        registry = types.SimpleNamespace(register_model=architectures.__setitem__)
        vllm = types.SimpleNamespace(__version__=version, ModelRegistry=registry)
        monkeypatch.setitem(sys.modules, "vllm", vllm)
        vllm_plugin.register()
        return architectures

    read_settings.cache_clear()
    yield run
    read_settings.cache_clear()


def test_the_plugin_does_nothing_without_its_setting(monkeypatch):
    monkeypatch.delenv(vllm_plugin.VARIABLE, raising=False)
    monkeypatch.setitem(sys.modules, "vllm", None)  # an import would fail
    vllm_plugin.register()


def test_the_setting_registers_the_four_families(setting):
    architectures = setting(json.dumps({"pruner": "divprune", "budget": "1/9"}))
    assert len(architectures) == 4
    assert all(name.startswith("stepprune_jax.") for name in architectures.values())


@pytest.mark.parametrize("version", ["0.31.2", "0.33.0", "0.320.0", "1.0"])
def test_another_vllm_is_refused_in_one_line(setting, version):
    with pytest.raises(SystemExit, match=f"works with vLLM 0.32, not {version}") as caught:
        setting('{"pruner": "grid", "budget": 4}', version)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("grid", "the setting is 'grid', expected a JSON object"),
        ('{"pruner": "grid"}', "expected a JSON object with budget"),
        ('{"pruner": "grid", "budget": 4, "share": 1}', "expected a JSON object"),
        ('{"pruner": "grit", "budget": 4}', "unknown pruner 'grit'"),
        ('{"policy": "shapes_qwen", "budget": "adaptive"}', "expected a count or a share"),
        ('{"policy": "shapes_qwen", "budget": "mean:16"}', "expected a count or a share"),
        ('{"policy": "nowhere", "budget": 4}', "nowhere"),
    ],
)
def test_a_bad_setting_ends_vllm_with_one_line(setting, text, message):
    with pytest.raises(SystemExit, match="error: STEPPRUNE_VLLM") as caught:
        setting(text)
    assert message in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"pruner": "fastv", "budget": 4}, "drops tokens between layers"),
        ({"pruner": "grid", "budget": 4000}, "budget"),
        ({"pruner": "evs", "budget": 4}, "evs prunes videos only, and the model reads images only"),
    ],
)
def test_a_method_that_does_not_fit_the_model_is_refused(setting, fields, message):
    setting(json.dumps(fields))
    backbone = load_vlm(SHAPES_MODEL, use="embeddings", progress=False).backbone
    with pytest.raises(ValueError, match=message):
        read_settings().check(backbone)


def test_methods_that_read_the_tower_are_refused_for_llava_next(setting, tmp_path):
    setting('{"pruner": "visionzip", "budget": 4}')
    folder = tiny_llava_next(tmp_path / "model")
    backbone = load_vlm(folder, use="embeddings", progress=False).backbone
    with pytest.raises(ValueError, match=r"visionzip reads the tower of each tile, .* divprune"):
        read_settings().check(backbone)


@pytest.mark.parametrize(
    ("pruner", "message"),
    [("evs", None), ("grid", None), ("visionzip", "visionzip prunes images only, and no videos")],
)
def test_methods_without_a_meaning_for_videos_are_refused_by_name(setting, pruner, message):
    setting(json.dumps({"pruner": pruner, "budget": 4}))
    backbone = load_vlm(SHAPES_QWEN, use="embeddings", progress=False).backbone
    read_settings().check(backbone)
    with contextlib.nullcontext() if message is None else pytest.raises(ValueError, match=message):
        read_settings().check_videos(backbone)


@pytest.mark.parametrize(
    ("pruner", "budget", "num_frames", "count"),
    [
        ("grid", "1/3", 4, 16),
        ("evs", "1/5", 4, 12),  # a temporal patch
        ("evs", "1/3", 4, 16),
        ("evs", "1/3", 1, 48),  # an image
        ("frames", "1/3", 4, 12),
        ("vidcom2", "1/99", 4, 4),  # a token of each temporal patch
    ],
)
@pytest.mark.filterwarnings("ignore:.* of 48 visual tokens")
def test_the_count_of_a_video_follows_from_its_temporal_patches(
    setting, pruner, budget, num_frames, count
):
    setting(json.dumps({"pruner": pruner, "budget": budget}))
    config = load_vlm(SHAPES_QWEN, use="embeddings", progress=False).config
    assert read_settings().count_kept(config, 48, num_frames) == count


def test_a_video_with_too_many_frames_is_refused(setting):
    setting('{"pruner": "frames", "budget": "1/2"}')
    config = load_vlm(SHAPES_QWEN, use="embeddings", progress=False).config
    assert read_settings().count_kept(config, 2 * 384, 384) == 384
    with pytest.raises(ValueError, match=r"385 temporal patches .* at most 384: sample fewer"):
        read_settings().count_kept(config, 2 * 385, 385)


def test_the_counts_of_a_policy_need_no_weights(setting):
    """vLLM counts in a process that it may fork later, where jax must not run."""
    setting('{"policy": "shapes_qwen", "budget": "1/3"}')
    settings = read_settings()
    assert settings.outline.params is None
    config = load_vlm(SHAPES_QWEN, use="embeddings", progress=False).config
    full = settings.build()
    for size in (1, 5, 64, 196):
        assert settings.count_kept(config, size) == full.schedule(config, size).enter
