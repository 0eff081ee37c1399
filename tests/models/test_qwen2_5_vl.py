"""Qwen2.5-VL beside `transformers`: pixels, tower, positions, logits and answers."""

import dataclasses
import functools
import json
from pathlib import Path
from typing import Any, NamedTuple

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import layouts
import numpy as np
import pytest
import torch
import transformers
from hf_reference import assert_close, error, random_reference
from tiny_qwen import tiny_qwen
from transformers.models.qwen2_5_vl import modeling_qwen2_5_vl as reference
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import (
    Qwen2VLImageProcessorPil,
    smart_resize,
)
from transformers.vision_utils import get_vision_window_index
from visual import noise

from stepprune_jax.checkpoints.folder import inspect_folder
from stepprune_jax.checkpoints.load import VLM, load_vlm
from stepprune_jax.checkpoints.save import save_vlm
from stepprune_jax.data.corpus import LengthLimits, make_row
from stepprune_jax.data.encoding import ConversationEncoder
from stepprune_jax.data.prompts import IMAGE_TOKEN, pad_batch
from stepprune_jax.inference import RunOptions, Sampling, generate
from stepprune_jax.models import vlm
from stepprune_jax.models.attention import Tap
from stepprune_jax.models.qwen2_5_vl import Qwen2_5_VL
from stepprune_jax.models.qwen2_5_vl.config import QwenVisionConfig
from stepprune_jax.models.qwen2_5_vl.images import padded_tokens, target_size
from stepprune_jax.models.stack import Execution, unstack
from stepprune_jax.models.weights import join
from stepprune_jax.training.batches import stack_targets
from stepprune_jax.training.language_loss import ForwardOptions, lm_loss

# Sizes (height, width) that are rounded, reduced, enlarged, and narrow.
SIZES = ((50, 70), (20, 90), (9, 8), (64, 31))
S = IMAGE_TOKEN
CONFIG, PROCESSOR = "config.json", "preprocessor_config.json"


class Pair(NamedTuple):
    """The reference and ours, with the same weights."""

    torch: Any
    folder: Path
    model: VLM

    @property
    def image_token(self):
        return self.model.config.image_token_id


def make_pair(folder, **changes):
    folder = tiny_qwen(folder, **changes)
    model = random_reference(transformers.Qwen2_5_VLForConditionalGeneration, folder)
    return Pair(model, folder, load_vlm(folder, dtype=jnp.float32, progress=False))


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    scaling = {"type": "mrope", "mrope_section": [1, 2, 3]}
    return make_pair(tmp_path_factory.mktemp("qwen"), rope_scaling=scaling)


def image(number):
    """That of `SIZES`."""
    return noise(SIZES[number][0], SIZES[number])


class Seen(NamedTuple):
    """Images as both processors see them, and the reference's features of each."""

    theirs: Any
    ours: Any
    features: tuple[torch.Tensor, ...]


def see(pair, images):
    processor = Qwen2VLImageProcessorPil.from_pretrained(pair.folder)
    theirs = processor(images, return_tensors="pt")
    ours = pair.model.backbone.preprocess(pair.model.image_settings, images)
    features = pair.torch.model.visual(theirs["pixel_values"], grid_thw=theirs["image_grid_thw"])
    counts = (theirs["image_grid_thw"].prod(1) // 4).tolist()
    return Seen(theirs, ours, features.pooler_output.split(counts))


@pytest.fixture(scope="module")
def seen(pair):
    """The images of `SIZES`."""
    return see(pair, [image(number) for number in range(len(SIZES))])


def test_patches_and_grids_equal_the_reference_bit_by_bit(pair, seen):
    theirs, ours, _ = seen
    backbone, grid = pair.model.backbone, theirs["image_grid_thw"].numpy()
    np.testing.assert_array_equal(ours.grid, grid[:, 1:] // 2)
    assert ours.values.shape == (4, 4 * 48, 48)  # the largest has 35 tokens
    parts = np.split(theirs["pixel_values"].numpy(), np.cumsum(grid.prod(1))[:-1])
    values = backbone.normalise(ours).values
    np.testing.assert_array_equal(jax.jit(backbone.normalise)(ours).values, values)
    for patches, expected in zip(values, parts, strict=True):
        frames = expected.reshape(len(expected), 3, 2, 16)
        for frame in range(2):
            np.testing.assert_array_equal(
                patches[: len(expected)].reshape(-1, 3, 16), frames[:, :, frame]
            )
        assert not patches[len(expected) :].any()
    cache = backbone.pixel_cache(pair.model.image_settings, 1 << 20)
    path = pair.folder / "small.png"
    image(2).save(path)
    for patches in (cache(path), cache(path)):  # decoded, and from the kept bytes
        np.testing.assert_array_equal(patches.values, ours.values[2, : len(patches.values)])
        np.testing.assert_array_equal(patches.grid, ours.grid[2])
    with pytest.raises(FileNotFoundError):
        cache(pair.folder / "absent.png")


@pytest.mark.parametrize("newer", [False, True])
def test_bounds_are_read_from_where_the_reference_reads_them(tmp_path, qwen_folder, newer):
    files = {name: json.loads((qwen_folder / name).read_text()) for name in (CONFIG, PROCESSOR)}
    sides = files[PROCESSOR].copy()
    for name in ("min_pixels", "max_pixels"):
        files[PROCESSOR][name], sides[name] = 640, None
    edges, repeated = {"shortest_edge": 300, "longest_edge": 900}, {"max_pixels": 5}
    for fields in (
        {},
        {"size": edges},
        {"size": edges, "max_pixels": 800},
        {"size": {"shortest_edge": 300}, "max_pixels": 800},
        {"size": repeated | {"min_pixels": 4}, "min_pixels": 256, "max_pixels": 800},
        {"max_pixels": 4000},
        # A call of the reference's processor fails with these.
        {"size": {"shortest_edge": 300}},
        {"size": {"height": 32, "width": 32}, "min_pixels": 256, "max_pixels": 800},
        {"size": repeated | edges},
    ):
        entry = sides | fields
        written = (
            {"processor_config.json": {"image_processor": entry}} if newer else {PROCESSOR: entry}
        )
        for name, raw in (files | written).items():
            (tmp_path / name).write_text(json.dumps(raw))
        try:
            theirs = Qwen2VLImageProcessorPil.from_pretrained(tmp_path)
            theirs(noise(0))
        except ValueError:
            with pytest.raises(ValueError, match=rf"{next(iter(written))}: size\b"):
                inspect_folder(tmp_path)
            continue
        ours = inspect_folder(tmp_path).config
        assert {"shortest_edge": ours.min_pixels, "longest_edge": ours.max_pixels} == theirs.size


@hypothesis.settings(max_examples=200)
@hypothesis.given(
    st.integers(1, 3000), st.integers(1, 3000), st.integers(1, 400), st.integers(0, 5000)
)
def test_sizes_and_their_bound_equal_the_reference(pair, height, width, least, more):
    vision = QwenVisionConfig(32, 52, 1, 2, full_blocks=(0,), out_size=48)
    bounds = {"min_pixels": 784 * least, "max_pixels": 784 * (least + more)}
    config = dataclasses.replace(pair.model.config, vision=vision, **bounds)
    if max(height, width) > 200 * min(height, width):
        with pytest.raises(ValueError, match=f"{width} x {height} pixels is too narrow"):
            target_size(config, height, width)
        return
    ours = target_size(config, height, width)
    assert ours == smart_resize(height, width, **bounds)
    tokens = ours[0] * ours[1] // 784
    assert tokens <= config.max_image_tokens
    padded = padded_tokens(tokens, config.max_image_tokens)
    assert tokens <= padded <= max(160, 2 * tokens)
    assert padded <= max(64, config.max_image_tokens * 5 / 4)


# The same for all tests, which thus share a program.
TAPS = (Tap("received", -1), Tap("keys", -1), Tap("hidden", -1))


@functools.partial(jax.jit, static_argnames=("config", "taps", "execution"))
def encode(params, config, pixels, taps=(), execution=Execution()):
    return Qwen2_5_VL(config).encode_image(params, pixels, taps, execution)


def by_hand(pair, theirs):
    """What each patch of the last block receives, its keys, and its result, image by image."""
    last, given = pair.torch.model.visual.blocks[-1], []
    attention, left = last.attn, []
    hook = attention.register_forward_pre_hook(
        lambda _, args, kwargs: given.append((args, kwargs)), with_kwargs=True
    )
    hidden = last.register_forward_hook(lambda _, args, output: left.append(output))
    grid = theirs["image_grid_thw"]
    pair.torch.model.visual(theirs["pixel_values"], grid_thw=grid)
    hook.remove()
    hidden.remove()
    (x,), more = given[0]
    query, key, _ = attention.qkv(x).reshape(len(x), 3, 2, 16).unbind(1)
    query, key = reference.apply_rotary_pos_emb_vision(query, key, *more["position_embeddings"])
    order, _ = get_vision_window_index(grid, 2, 16, 4)
    found, first = [], 0
    for count in (grid.prod(1)).tolist():
        q, k = (part[first : first + count].transpose(0, 1) for part in (query, key))
        weights = torch.softmax(q @ k.transpose(1, 2) / 4, dim=2)
        parts = weights.mean((0, 1)), k.mean(0), left[0][first : first + count]
        merged = [part.reshape(count // 4, 4, -1).mean(1) for part in parts]
        raster = order[first // 4 : (first + count) // 4] - first // 4
        found.append([part[torch.argsort(raster)] for part in merged])
        first += count
    return found


def test_tower_merger_and_taps_equal_the_reference(pair, seen):
    theirs, ours, features = seen
    config = pair.model.config
    tokens, tapped = encode(pair.model.params, config, ours, TAPS)
    assert tokens.shape[1] == Qwen2_5_VL(config).padded_tokens(ours)
    expected = by_hand(pair, theirs)
    for number, part in enumerate(features):
        assert_close(tokens[number, : len(part)], part)
        received, keys, hidden = expected[number]
        assert_close(tapped["received.-1"][number, : len(part)], received[:, 0])
        assert_close(tapped["keys.-1"][number, : len(part)], keys)
        assert_close(tapped["hidden.-1"][number, : len(part)], hidden)
        assert not tapped["received.-1"][number, len(part) :].any()
    with pytest.raises(ValueError, match=r"received\.1 belongs to a block that attends within"):
        encode(pair.model.params, config, ours, (Tap("received", 1),))
    listed = unstack(join(jax.tree.map(jnp.copy, pair.model.params)))
    padded = jax.tree.map(lambda x: np.concatenate([x, np.zeros_like(x[:1])]), ours)
    fused, _ = encode(listed, config, padded, execution=Execution(attention="xla"))
    for number, part in enumerate(features):
        assert_close(fused[number, : len(part)], part)
    assert np.isfinite(fused).all()


# A text; an image; one with text around; two and three of different sizes. The reference wants text
# between images, as the template has.
ROWS = (
    ([5, 6, 7, 8], ()),
    ([1, S, 30], (0,)),
    ([1, 7, S, 8, 9], (1,)),
    ([S, 4, S, 3], (2, 3)),
    ([1, S, 5, S, 6, S], (3, 0, 2)),
)


def assembled(pair, rows, features, grid):
    """Rows with all tokens of their images."""
    ids, length = pad_batch([row for row, _ in rows])
    shown = np.full((len(rows), 3), -1)
    for row, (_, images) in enumerate(rows):
        shown[row, : len(images)] = images
    counts = np.where(shown >= 0, np.prod(grid, 1)[shown], 0)
    n = features.shape[1]
    index = np.broadcast_to(np.arange(n, dtype=np.int32), (*shown.shape, n))
    visual = vlm.Visual(
        features[shown], index < counts[..., None], index, index, jnp.asarray(grid)[shown]
    )
    place = jax.jit(vlm.assemble, static_argnames=("backbone", "capacity"))
    return place(pair.model.params, pair.model.backbone, ids, length, visual, capacity=128)


def inputs_of_reference(pair, seen, row):
    """Ids with all places of their images, and these."""
    ids, images = row
    grid, pixels = seen.ours.grid, seen.theirs["pixel_values"]
    parts = pixels.split(seen.theirs["image_grid_thw"].prod(1).tolist())
    shown, out = iter(images), []
    for token in ids:
        is_image = token in (S, pair.image_token)
        out += [pair.image_token] * int(np.prod(grid[next(shown)])) if is_image else [int(token)]
    ids = torch.tensor([out])
    inputs = {"input_ids": ids, "mm_token_type_ids": (ids == pair.image_token).int()}
    if images:
        inputs["image_grid_thw"] = seen.theirs["image_grid_thw"][list(images)]
        inputs["pixel_values"] = torch.cat([parts[number] for number in images])
    pair.torch.model.rope_deltas = None
    return inputs


def assert_positions_and_logits_equal(pair, seen, rows):
    params, config, ours = pair.model.params, pair.model.config, seen.ours
    tokens, _ = encode(params, config, ours, TAPS)
    sequence = assembled(pair, rows, tokens, ours.grid)
    prefill = jax.jit(vlm.prefill, static_argnames=("config", "max_new_tokens", "all_logits"))
    logits = prefill(params, config, sequence, 1, all_logits=True).logits
    halved = jax.tree.map(lambda x: x.astype(jnp.bfloat16), (params, sequence.hidden))
    narrow = prefill(
        halved[0], config, sequence._replace(hidden=halved[1]), 1, all_logits=True
    ).logits
    for number, row in enumerate(rows):
        inputs = inputs_of_reference(pair, seen, row)
        length = inputs["input_ids"].shape[1]
        assert sequence.length[number] == length
        position, delta = pair.torch.model.get_rope_index(
            inputs["input_ids"], inputs["mm_token_type_ids"], inputs.get("image_grid_thw")
        )
        np.testing.assert_array_equal(sequence.position[number, :, :length], position[:, 0])
        assert sequence.next_position[number] == length + int(delta[0, 0])
        expected = pair.torch(**inputs).logits[0]
        assert_close(logits[number, :length], expected, what=f"row {number}")
        assert error(narrow[number, :length].astype(jnp.float32), expected) < 0.06


def test_position_ids_and_logits_equal_the_reference(pair, seen):
    assert_positions_and_logits_equal(pair, seen, ROWS)


@pytest.mark.slow
def test_published_widths_equal_the_reference(tmp_path):
    """One block of the tower, and one layer of the 3B."""
    tower = {"depth": 1, "fullatt_block_indexes": [0], "hidden_size": 1280, "patch_size": 14}
    tower |= {"model_type": "qwen2_5_vl", "out_hidden_size": 2048}
    heads = {"num_attention_heads": 16, "num_key_value_heads": 2, "num_hidden_layers": 1}
    pair = make_pair(
        tmp_path,
        vision_config=tower,
        **heads,
        hidden_size=2048,
        intermediate_size=11008,
        rope_scaling={"type": "mrope", "mrope_section": [16, 24, 24]},
        tie_word_embeddings=True,
        min_pixels=28 * 28,
        max_pixels=40 * 28 * 28,
    )
    seen = see(pair, [noise(0, (90, 150))])
    assert_positions_and_logits_equal(pair, seen, [([1, S, 5], (0,))])


def test_the_loss_of_answers_equals_the_reference(pair, seen):
    """Of two conversations whose images have 35 and 12 tokens."""
    config, ours = pair.model.config, seen.ours
    encoder = ConversationEncoder(
        pair.model.tokenizer, Qwen2_5_VL.place_images, Qwen2_5_VL.conversation
    )
    turns, images = (("Red?", "No."), ("What?", "A dog.", "Why?", "So.")), (0, 2)
    limits = LengthLimits(config.max_image_tokens, 400, 16)
    rows = [make_row(encoder.encode(said, 1), limits) for said in turns]
    assert [pair.model.tokenizer.decode(row.target) for row in rows] == [
        "No.<|im_end|>",
        "So.<|im_end|>",  # the last answer alone
    ]
    targets = stack_targets(rows, ours.grid[list(images)], 200, 32)
    tokens, _ = encode(pair.model.params, config, ours, TAPS)
    loss = jax.jit(lm_loss, static_argnums=(1, 2))(
        pair.model.params, pair.model.backbone, ForwardOptions(), tokens[np.array(images)], targets
    )
    total = 0
    for row, number in zip(rows, images, strict=True):
        inputs = inputs_of_reference(pair, seen, (row.ids, (number,)))
        logits = pair.torch(**inputs).logits[0]
        places = torch.tensor(row.place + int(ours.grid[number].prod()) - 1)
        total += torch.nn.functional.cross_entropy(
            logits[places], torch.tensor(row.target).long(), reduction="sum"
        )
    np.testing.assert_allclose(loss, total / sum(len(row.target) for row in rows), rtol=1e-5)


def answer_of_reference(pair, seen, prompt, images, **options):
    """Greedy ids."""
    text = (
        "<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n<|im_start|>user\n"
        + "<|vision_start|><|image_pad|><|vision_end|>" * len(images)
        + f"{prompt}<|im_end|>\n<|im_start|>assistant\n"
    )
    ids = pair.model.tokenizer(text).input_ids
    inputs = inputs_of_reference(pair, seen, (ids, images))
    answer = pair.torch.generate(**inputs, max_new_tokens=8, do_sample=False, **options)
    return answer[0, inputs["input_ids"].shape[1] :].tolist()


def test_answers_with_the_repetition_penalty_of_the_folder_equal_the_reference(pair, seen):
    """Published folders have one of 1.05; it counts prompt, image and answer, row by row."""
    file = pair.folder / "generation_config.json"
    file.write_text('{"repetition_penalty": 1.5}')
    try:
        model = load_vlm(pair.folder, dtype=jnp.float32, progress=False)
    finally:
        file.unlink()
    cases = [("Is it red?", (0, 1)), ("Is there a red one in it, or a blue one?", ())]
    expected = [answer_of_reference(pair, seen, *case, repetition_penalty=1.5) for case in cases]
    prompts = [prompt for prompt, _ in cases]
    shown = [list(map(image, numbers)) for _, numbers in cases]
    options = RunOptions(max_tokens=8)
    answers = generate(model, prompts, shown, options=options)
    assert [list(answer.token_ids) for answer in answers] == expected
    unpenalised = Sampling(repetition_penalty=1)
    plain = generate(model, prompts, shown, sampling=unpenalised, options=options)
    assert [list(answer.token_ids) for answer in plain] != expected


@pytest.mark.parametrize(("write", "tied"), [(layouts.new_qwen, False), (tiny_qwen, True)])
def test_every_layout_is_loaded_and_written(tmp_path, write, tied):
    folder = write(tmp_path / "from", tie_word_embeddings=tied)
    model = load_vlm(folder, dtype=jnp.float32, max_pixels=1024, progress=False)
    assert ("head" in model.params["language"]) != tied
    assert model.config.max_pixels == 1024 and model.config.min_pixels == 256
    save_vlm(model, tmp_path / "to")
    again = load_vlm(tmp_path / "to", dtype=jnp.float32, progress=False)
    assert again.config == model.config
    assert again.image_settings == model.image_settings
    jax.tree.map(np.testing.assert_array_equal, again.params, model.params)
    other = dataclasses.replace(model.config, eos_token_ids=(5, 6, 7))
    assert Qwen2_5_VL.read(other.to_hf("float32"), None).config.eos_token_ids == (5, 6, 7)


def conversation(*turns):
    return Qwen2_5_VL.conversation([Qwen2_5_VL.place_images(turns[0], 1), *turns[1:]])


def test_prompts_are_those_of_the_chat_template():
    start = (
        "<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n"
        "<|im_start|>user\n<|vision_start|><image><|vision_end|>What?<|im_end|>\n"
        "<|im_start|>assistant\n"
    )
    for words in ("What?", "<image>\nWhat?", "What?\n<image>"):
        assert conversation(words) == start
    closed = conversation("What?", "A dog.")
    assert closed == start + "A dog.<|im_end|>"
    again = conversation("What?", "A dog.", "Why?")
    assert again == closed + "\n<|im_start|>user\nWhy?<|im_end|>\n<|im_start|>assistant\n"
    silent = conversation("What?", "", "Why?")
    assert silent == start + again.removeprefix(start + "A dog.")
    assert Qwen2_5_VL.place_images("Both?", 2) == "<image><image>Both?"
    own = start.replace("You are a helpful assistant.", "Be brief.")
    assert Qwen2_5_VL.conversation([Qwen2_5_VL.place_images("What?", 1)], "Be brief.") == own


@pytest.mark.parametrize("words", ["<|image_pad|>What?", "<image><image>?"])
def test_placeholders_that_do_not_match_are_refused(words):
    with pytest.raises(ValueError, match="the prompt has "):
        conversation(words)
