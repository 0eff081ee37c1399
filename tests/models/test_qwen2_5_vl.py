"""Qwen2.5-VL equals `transformers`: pixels, tower, positions, logits and answers."""

import dataclasses
import functools
import json
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
from hf_reference import (
    assert_close,
    assert_patches_equal,
    assert_taps_equal,
    error,
    make_pair,
    qwen_inputs,
    save_and_reload,
)
from tiny_qwen import tiny_qwen
from transformers.models.qwen2_5_vl import modeling_qwen2_5_vl as reference
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import (
    Qwen2VLImageProcessorPil,
    smart_resize,
)
from transformers.vision_utils import get_vision_window_index
from visual import kept_at, noise

from stepprune_jax.checkpoints.folder import inspect_folder
from stepprune_jax.checkpoints.load import load_vlm
from stepprune_jax.data.corpus import LengthLimits, make_row
from stepprune_jax.data.encoding import ConversationEncoder
from stepprune_jax.data.prompts import IMAGE_TOKEN, pad_batch
from stepprune_jax.inference import RunOptions, Sampling, generate
from stepprune_jax.models import vlm
from stepprune_jax.models.assembly import assemble
from stepprune_jax.models.attention import Tap
from stepprune_jax.models.qwen2_5_vl import Qwen2_5_VL
from stepprune_jax.models.qwen2_5_vl.config import QwenVisionConfig
from stepprune_jax.models.qwen2_5_vl.images import num_padded_tokens, target_size
from stepprune_jax.models.stack import Execution, unstack
from stepprune_jax.models.weights import join_kernels
from stepprune_jax.training.batches import stack_targets
from stepprune_jax.training.language_loss import ForwardOptions, lm_loss

# (height, width) of images that are rounded, reduced, enlarged, and narrow.
SIZES = ((50, 70), (20, 90), (9, 8), (64, 31))
S = IMAGE_TOKEN
MODEL = transformers.Qwen2_5_VLForConditionalGeneration
CONFIG, PROCESSOR = "config.json", "preprocessor_config.json"


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    scaling = {"type": "mrope", "mrope_section": [1, 2, 3]}
    return make_pair(MODEL, tiny_qwen(tmp_path_factory.mktemp("qwen"), rope_scaling=scaling))


def image(number):
    """Returns a random image with the size of a number in `SIZES`."""
    return noise(SIZES[number][0], SIZES[number])


class Processed(NamedTuple):
    """Images, processed by both implementations, and the reference's features of each image."""

    theirs: Any
    ours: Any
    features: tuple[torch.Tensor, ...]


def process_images(pair, images):
    processor = Qwen2VLImageProcessorPil.from_pretrained(pair.folder)
    theirs = processor(images, return_tensors="pt")
    ours = pair.model.backbone.preprocess(pair.model.image_settings, images)
    features = pair.torch.model.visual(theirs["pixel_values"], grid_thw=theirs["image_grid_thw"])
    counts = (theirs["image_grid_thw"].prod(1) // 4).tolist()
    return Processed(theirs, ours, features.pooler_output.split(counts))


@pytest.fixture(scope="module")
def processed(pair):
    """Processes the images of `SIZES`."""
    return process_images(pair, [image(number) for number in range(len(SIZES))])


def test_patches_and_grids_equal_the_reference_bit_for_bit(pair, processed):
    theirs, ours, _ = processed
    backbone = pair.model.backbone
    np.testing.assert_array_equal(ours.grid, theirs["image_grid_thw"][:, 1:] // 2)
    # The largest image has 35 tokens, which are padded to 48.
    assert ours.values.shape == (4, 4 * 48, 48)
    values = backbone.normalise(ours).values
    np.testing.assert_array_equal(jax.jit(backbone.normalise)(ours).values, values)
    assert_patches_equal(values, theirs)
    cache = backbone.pixel_cache(pair.model.image_settings, 1 << 20)
    path = pair.folder / "small.png"
    image(2).save(path)
    for patches in (cache(path), cache(path)):  # decoded, then from the cache
        np.testing.assert_array_equal(patches.values, ours.values[2, : len(patches.values)])
        np.testing.assert_array_equal(patches.grid, ours.grid[2])
    with pytest.raises(FileNotFoundError):
        cache(pair.folder / "absent.png")


@pytest.mark.parametrize("newer", [False, True])
def test_area_bounds_are_read_as_by_the_reference(tmp_path, qwen_folder, newer):
    files = {name: json.loads((qwen_folder / name).read_text()) for name in (CONFIG, PROCESSOR)}
    processor_fields = files[PROCESSOR].copy()
    for name in ("min_pixels", "max_pixels"):
        files[PROCESSOR][name], processor_fields[name] = 640, None
    size_bounds, repeated = {"shortest_edge": 300, "longest_edge": 900}, {"max_pixels": 5}
    for fields in (
        {},
        {"size": size_bounds},
        {"size": size_bounds, "max_pixels": 800},
        {"size": {"shortest_edge": 300}, "max_pixels": 800},
        {"size": repeated | {"min_pixels": 4}, "min_pixels": 256, "max_pixels": 800},
        {"max_pixels": 4000},
        # The reference's processor raises an error for these fields.
        {"size": {"shortest_edge": 300}},
        {"size": {"height": 32, "width": 32}, "min_pixels": 256, "max_pixels": 800},
        {"size": repeated | size_bounds},
    ):
        entry = processor_fields | fields
        newer_file = {"processor_config.json": {"image_processor": entry}}
        processor_file = newer_file if newer else {PROCESSOR: entry}
        for name, raw in (files | processor_file).items():
            (tmp_path / name).write_text(json.dumps(raw))
        try:
            theirs = Qwen2VLImageProcessorPil.from_pretrained(tmp_path)
            theirs(noise(0))
        except ValueError:
            with pytest.raises(ValueError, match=rf"{next(iter(processor_file))}: size\b"):
                inspect_folder(tmp_path)
            continue
        ours = inspect_folder(tmp_path).config
        assert {"shortest_edge": ours.min_pixels, "longest_edge": ours.max_pixels} == theirs.size


@hypothesis.settings(max_examples=200)
@hypothesis.given(st.tuples(*[st.integers(1, 3000)] * 2), st.integers(1, 400), st.integers(0, 5000))
def test_target_sizes_equal_the_reference_within_the_bound(pair, size, min_tokens, extra_tokens):
    height, width = size
    vision = QwenVisionConfig(32, 52, 1, 2, full_blocks=(0,), out_size=48)
    bounds = {"min_pixels": 784 * min_tokens, "max_pixels": 784 * (min_tokens + extra_tokens)}
    config = dataclasses.replace(pair.model.config, vision=vision, **bounds)
    if max(height, width) > 200 * min(height, width):
        with pytest.raises(ValueError, match=f"{width} x {height} pixels is too narrow"):
            target_size(config, height, width)
        return
    ours = target_size(config, height, width)
    assert ours == smart_resize(height, width, **bounds)
    tokens = ours[0] * ours[1] // 784
    assert tokens <= config.max_image_tokens
    padded = num_padded_tokens(tokens, config.max_image_tokens)
    assert tokens <= padded <= max(160, 2 * tokens)
    assert padded <= max(64, config.max_image_tokens * 5 / 4)


# All tests request the same taps and therefore share a compiled program.
TAPS = (Tap("received", -1), Tap("keys", -1), Tap("hidden", -1))


@functools.partial(jax.jit, static_argnames=("config", "taps", "execution"))
def encode(params, config, pixels, taps=(), execution=Execution()):
    return Qwen2_5_VL(config).encode_image(params, pixels, taps, execution)


def taps_of_reference(pair, theirs):
    """Computes received attention, keys and hidden states of the last block for each image."""
    last_block, attention_inputs = pair.torch.model.visual.blocks[-1], []
    attention, block_outputs = last_block.attn, []
    hook = attention.register_forward_pre_hook(
        lambda _, args, kwargs: attention_inputs.append((args, kwargs)), with_kwargs=True
    )
    hidden = last_block.register_forward_hook(lambda _, args, output: block_outputs.append(output))
    grid = theirs["image_grid_thw"]
    pair.torch.model.visual(theirs["pixel_values"], grid_thw=grid)
    hook.remove()
    hidden.remove()
    (hidden_input,), keywords = attention_inputs[0]
    query, key, _ = attention.qkv(hidden_input).reshape(len(hidden_input), 3, 2, 16).unbind(1)
    query, key = reference.apply_rotary_pos_emb_vision(query, key, *keywords["position_embeddings"])
    order, _ = get_vision_window_index(grid, 2, 16, 4)
    results, first = [], 0
    for count in (grid.prod(1)).tolist():
        q, k = (values[first : first + count].transpose(0, 1) for values in (query, key))
        weights = torch.softmax(q @ k.transpose(1, 2) / 4, dim=2)
        patch_values = weights.mean((0, 1)), k.mean(0), block_outputs[0][first : first + count]
        merged = [values.reshape(count // 4, 4, -1).mean(1) for values in patch_values]
        raster = order[first // 4 : (first + count) // 4] - first // 4
        results.append([values[torch.argsort(raster)] for values in merged])
        first += count
    return results


def test_tower_merger_and_taps_equal_the_reference(pair, processed):
    theirs, ours, features = processed
    config = pair.model.config
    tokens, tapped = encode(pair.model.params, config, ours, TAPS)
    assert tokens.shape[1] == Qwen2_5_VL(config).num_padded_tokens(ours)
    expected = taps_of_reference(pair, theirs)
    for number, feature in enumerate(features):
        assert_close(tokens[number, : len(feature)], feature)
        assert_taps_equal(tapped, -1, number, expected[number])
    with pytest.raises(ValueError, match=r"received\.1 belongs to a block that attends within"):
        encode(pair.model.params, config, ours, (Tap("received", 1),))
    unstacked = unstack(join_kernels(jax.tree.map(jnp.copy, pair.model.params)))
    padded_pixels = jax.tree.map(lambda x: np.concatenate([x, np.zeros_like(x[:1])]), ours)
    fused, _ = encode(unstacked, config, padded_pixels, execution=Execution(attention="xla"))
    for number, feature in enumerate(features):
        assert_close(fused[number, : len(feature)], feature)
    assert np.isfinite(fused).all()


# Rows of ids with the numbers of their images: text, one image, an image between text, and two and
# three images of different sizes. The reference requires text between images, as in the template.
ROWS = (
    ([5, 6, 7, 8], ()),
    ([1, S, 30], (0,)),
    ([1, 7, S, 8, 9], (1,)),
    ([S, 4, S, 3], (2, 3)),
    ([1, S, 5, S, 6, S], (3, 0, 2)),
)


def assemble_rows(pair, rows, features, grid):
    """Assembles rows with all tokens of their images."""
    ids, length = pad_batch([row for row, _ in rows])
    image_numbers = np.full((len(rows), 3), -1)
    for row, (_, images) in enumerate(rows):
        image_numbers[row, : len(images)] = images
    counts = np.where(image_numbers >= 0, np.prod(grid, 1)[image_numbers], 0)
    n = features.shape[1]
    index = np.broadcast_to(np.arange(n, dtype=np.int32), (*image_numbers.shape, n))
    kept = kept_at(features[image_numbers], index < counts[..., None], index)
    run = jax.jit(assemble, static_argnames=("backbone", "capacity"))
    params, backbone = pair.model.params, pair.model.backbone
    grids = jnp.asarray(grid)[image_numbers]
    return run(params, backbone, ids, length, kept, grids, capacity=128)


def inputs_of_reference(pair, processed, row):
    """Returns the reference's inputs: ids with one id per visual token, and images."""
    ids, images = row
    image_id, remaining_images, expanded_ids = pair.model.config.image_token_id, iter(images), []
    for token in ids:
        if token in (S, image_id):
            count = int(np.prod(processed.ours.grid[next(remaining_images)]))
            expanded_ids += [image_id] * count
        else:
            expanded_ids.append(int(token))
    return qwen_inputs(pair, expanded_ids, processed.theirs, images)


def assert_positions_and_logits_equal(pair, processed, rows):
    params, config, ours = pair.model.params, pair.model.config, processed.ours
    tokens, _ = encode(params, config, ours, TAPS)
    sequence = assemble_rows(pair, rows, tokens, ours.grid)
    prefill = jax.jit(vlm.prefill, static_argnames=("config", "max_new_tokens", "all_logits"))
    logits = prefill(params, config, sequence, 1, all_logits=True).logits
    bfloat16_inputs = jax.tree.map(lambda x: x.astype(jnp.bfloat16), (params, sequence.hidden))
    bfloat16_logits = prefill(
        bfloat16_inputs[0], config, sequence._replace(hidden=bfloat16_inputs[1]), 1, all_logits=True
    ).logits
    for number, row in enumerate(rows):
        inputs = inputs_of_reference(pair, processed, row)
        length = inputs["input_ids"].shape[1]
        assert sequence.length[number] == length
        position, delta = pair.torch.model.get_rope_index(
            inputs["input_ids"], inputs["mm_token_type_ids"], inputs.get("image_grid_thw")
        )
        np.testing.assert_array_equal(sequence.position[number, :, :length], position[:, 0])
        assert sequence.next_position[number] == length + int(delta[0, 0])
        expected = pair.torch(**inputs).logits[0]
        assert_close(logits[number, :length], expected, what=f"row {number}")
        assert error(bfloat16_logits[number, :length].astype(jnp.float32), expected) < 0.06


def test_position_ids_and_logits_equal_the_reference(pair, processed):
    assert_positions_and_logits_equal(pair, processed, ROWS)


@pytest.mark.slow
def test_published_widths_equal_the_reference(tmp_path):
    """Compares one block of the tower and one layer of the 3B model."""
    tower = {"depth": 1, "fullatt_block_indexes": [0], "hidden_size": 1280, "patch_size": 14}
    tower |= {"model_type": "qwen2_5_vl", "out_hidden_size": 2048}
    heads = {"num_attention_heads": 16, "num_key_value_heads": 2, "num_hidden_layers": 1}
    folder = tiny_qwen(
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
    pair = make_pair(MODEL, folder)
    processed = process_images(pair, [noise(0, (90, 150))])
    assert_positions_and_logits_equal(pair, processed, [([1, S, 5], (0,))])


def test_the_loss_of_answers_equals_the_reference(pair, processed):
    """Compares two conversations with images of different sizes."""
    config, ours = pair.model.config, processed.ours
    encoder = ConversationEncoder(
        pair.model.tokenizer, Qwen2_5_VL.place_images, Qwen2_5_VL.conversation
    )
    turns, images = (("Red?", "No."), ("What?", "A dog.", "Why?", "So.")), (0, 2)
    limits = LengthLimits(config.max_image_tokens, 400, 16)
    rows = [make_row(encoder.encode(turn, 1), limits) for turn in turns]
    assert [pair.model.tokenizer.decode(row.target) for row in rows] == [
        "No.<|im_end|>",
        "So.<|im_end|>",  # only the last answer is a target
    ]
    targets = stack_targets(rows, ours.grid[list(images)], 200, 32)
    tokens, _ = encode(pair.model.params, config, ours, TAPS)
    loss = jax.jit(lm_loss, static_argnums=(1, 2))(
        pair.model.params, pair.model.backbone, ForwardOptions(), tokens[np.array(images)], targets
    )
    total = 0
    for row, number in zip(rows, images, strict=True):
        inputs = inputs_of_reference(pair, processed, (row.ids, (number,)))
        logits = pair.torch(**inputs).logits[0]
        places = torch.tensor(row.place + int(ours.grid[number].prod()) - 1)
        total += torch.nn.functional.cross_entropy(
            logits[places], torch.tensor(row.target).long(), reduction="sum"
        )
    np.testing.assert_allclose(loss, total / sum(len(row.target) for row in rows), rtol=1e-5)


def answer_of_reference(pair, processed, prompt, images, **options):
    """Returns the reference's greedy answer to a prompt."""
    text = (
        "<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n<|im_start|>user\n"
        + "<|vision_start|><|image_pad|><|vision_end|>" * len(images)
        + f"{prompt}<|im_end|>\n<|im_start|>assistant\n"
    )
    ids = pair.model.tokenizer(text).input_ids
    inputs = inputs_of_reference(pair, processed, (ids, images))
    answer = pair.torch.generate(**inputs, max_new_tokens=8, do_sample=False, **options)
    return answer[0, inputs["input_ids"].shape[1] :].tolist()


@pytest.mark.supports("qwen2_5_vl", "answer")
def test_the_repetition_penalty_of_the_folder_gives_the_reference_answers(pair, processed):
    """The penalty applies to the tokens of prompt, images and answer of each row.

    Published folders have a penalty of 1.05.
    """
    file = pair.folder / "generation_config.json"
    file.write_text('{"repetition_penalty": 1.5}')
    try:
        model = load_vlm(pair.folder, dtype=jnp.float32, progress=False)
    finally:
        file.unlink()
    cases = [("Is it red?", (0, 1)), ("Is there a red one in it, or a blue one?", ())]
    expected = [
        answer_of_reference(pair, processed, *case, repetition_penalty=1.5) for case in cases
    ]
    prompts = [prompt for prompt, _ in cases]
    images = [list(map(image, numbers)) for _, numbers in cases]
    options = RunOptions(max_tokens=8)
    answers = generate(model, prompts, images, options=options)
    assert [list(answer.token_ids) for answer in answers] == expected
    unpenalised = Sampling(repetition_penalty=1)
    unpenalised_answers = generate(model, prompts, images, sampling=unpenalised, options=options)
    assert [list(answer.token_ids) for answer in unpenalised_answers] != expected


@pytest.mark.parametrize(("write", "tied"), [(layouts.new_qwen, False), (tiny_qwen, True)])
def test_every_layout_is_loaded_and_saved(tmp_path, write, tied):
    folder = write(tmp_path / "from", tie_word_embeddings=tied)
    model = load_vlm(folder, dtype=jnp.float32, max_pixels=1024, progress=False)
    assert ("head" in model.params["language"]) != tied
    assert model.config.max_pixels == 1024 and model.config.min_pixels == 256
    reloaded = save_and_reload(model, tmp_path / "to")
    jax.tree.map(np.testing.assert_array_equal, reloaded.params, model.params)
    changed = dataclasses.replace(model.config, eos_token_ids=(5, 6, 7))
    assert Qwen2_5_VL.read(changed.to_hf("float32"), None).config.eos_token_ids == (5, 6, 7)


def conversation(*turns):
    return Qwen2_5_VL.conversation([Qwen2_5_VL.place_images(turns[0], 1), *turns[1:]])


def test_prompts_equal_the_chat_template():
    start = (
        "<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n"
        "<|im_start|>user\n<|vision_start|><image><|vision_end|>What?<|im_end|>\n"
        "<|im_start|>assistant\n"
    )
    for words in ("What?", "<image>\nWhat?", "What?\n<image>"):
        assert conversation(words) == start
    answered = conversation("What?", "A dog.")
    assert answered == start + "A dog.<|im_end|>"
    second_question = conversation("What?", "A dog.", "Why?")
    second_turn = "\n<|im_start|>user\nWhy?<|im_end|>\n<|im_start|>assistant\n"
    assert second_question == answered + second_turn
    without_answer = conversation("What?", "", "Why?")
    assert without_answer == start + second_question.removeprefix(start + "A dog.")
    assert Qwen2_5_VL.place_images("Both?", 2) == "<image><image>Both?"
    with_system = start.replace("You are a helpful assistant.", "Be brief.")
    turns = [Qwen2_5_VL.place_images("What?", 1)]
    assert Qwen2_5_VL.conversation(turns, "Be brief.") == with_system


@pytest.mark.parametrize("words", ["<|image_pad|>What?", "<image><image>?"])
def test_prompts_with_tokens_of_images_are_refused(words):
    with pytest.raises(ValueError, match="the prompt has "):
        conversation(words)
