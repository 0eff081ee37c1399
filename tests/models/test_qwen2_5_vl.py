"""Qwen2.5-VL beside `transformers`: pixels, tower, positions, logits and answers."""

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
from hf_reference import as_torch, assert_close, error, randomise
from transformers.models.qwen2_5_vl import modeling_qwen2_5_vl as reference
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import (
    Qwen2VLImageProcessorPil,
    smart_resize,
)
from transformers.vision_utils import get_vision_window_index
from visual import noise

from stepprune_jax import testing
from stepprune_jax.checkpoints.load import VLM, load_vlm
from stepprune_jax.checkpoints.save import save_vlm
from stepprune_jax.cli.generate import main
from stepprune_jax.data.corpus import Limits, make_row
from stepprune_jax.data.encoding import ConversationEncoder
from stepprune_jax.data.prompts import IMAGE_TOKEN, pad_batch
from stepprune_jax.inference import RunOptions, Sampling, generate
from stepprune_jax.models import decoder, vlm
from stepprune_jax.models.attention import Tap
from stepprune_jax.models.qwen2_5_vl import QWEN2_5_VL, tower
from stepprune_jax.models.qwen2_5_vl.config import QwenConfig, QwenVisionConfig
from stepprune_jax.models.qwen2_5_vl.images import padded_tokens, target_size
from stepprune_jax.models.sequence import Rows
from stepprune_jax.models.stack import Execution, lay_out
from stepprune_jax.training.batches import stack_targets
from stepprune_jax.training.language_loss import ForwardOptions, lm_loss

# Sizes (height, width) that are rounded, reduced, enlarged, and narrow.
SIZES = ((50, 70), (20, 90), (9, 8), (64, 31))
S = IMAGE_TOKEN


class Pair(NamedTuple):
    """The reference and ours, with the same weights."""

    torch: Any
    folder: Path
    model: VLM
    raw: dict[str, Any]


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    folder = testing.tiny_qwen(tmp_path_factory.mktemp("qwen"))
    raw = json.loads((folder / "config.json").read_text())
    config = transformers.Qwen2_5_VLConfig(**json.loads(json.dumps(raw)))
    model = transformers.Qwen2_5_VLForConditionalGeneration._from_config(
        config, attn_implementation="eager"
    )
    randomise(model)
    (folder / "model.safetensors").unlink()
    settings = (folder / "config.json").read_text()
    model.save_pretrained(folder)
    (folder / "generation_config.json").unlink()
    (folder / "config.json").write_text(settings)  # as published, not as this version writes it
    return Pair(model, folder, load_vlm(folder, dtype=jnp.float32, progress=False), raw)


def logits_of_reference(pair, ids, pixels=None, grids=None):
    """Of one row [1, l]."""
    pair.torch.model.rope_deltas = None
    types = (ids == pair.raw["image_token_id"]).int()
    return pair.torch(
        input_ids=ids, mm_token_type_ids=types, pixel_values=pixels, image_grid_thw=grids
    ).logits[0]


def by_image(theirs):
    """The patches of each image."""
    return theirs["pixel_values"].split(theirs["image_grid_thw"].prod(1).tolist())


def image(number):
    """That of `SIZES`."""
    return noise(SIZES[number][0], SIZES[number])


@pytest.fixture(scope="module")
def seen(pair):
    """The images of `SIZES` as both processors see them, and the reference's features."""
    images = [image(number) for number in range(len(SIZES))]
    processor = Qwen2VLImageProcessorPil.from_pretrained(pair.folder)
    theirs = processor(images, return_tensors="pt")
    ours = QWEN2_5_VL.preprocess(pair.model.config, pair.model.image_settings, images)
    features = pair.torch.model.visual(theirs["pixel_values"], grid_thw=theirs["image_grid_thw"])
    counts = (theirs["image_grid_thw"].prod(1) // 4).tolist()
    return theirs, ours, features.pooler_output.split(counts)


def test_patches_and_grids_equal_the_reference_bit_by_bit(pair, seen):
    theirs, ours, _ = seen
    grid = theirs["image_grid_thw"].numpy()
    np.testing.assert_array_equal(ours.grid, grid[:, 1:] // 2)
    assert ours.values.shape == (4, 4 * 48, 48)  # the largest has 35 tokens
    parts = np.split(theirs["pixel_values"].numpy(), np.cumsum(grid.prod(1))[:-1])
    for patches, expected in zip(ours.values, parts, strict=True):
        frames = expected.reshape(len(expected), 3, 2, 16)
        for frame in range(2):
            np.testing.assert_array_equal(
                patches[: len(expected)].reshape(-1, 3, 16), frames[:, :, frame]
            )
        assert not patches[len(expected) :].any()
    cache = QWEN2_5_VL.pixel_cache(pair.model.config, pair.model.image_settings, 1 << 20)
    path = pair.folder / "small.png"
    image(2).save(path)
    for patches in (cache(path), cache(path)):  # decoded, and from the kept bytes
        np.testing.assert_array_equal(patches.values, ours.values[2, : len(patches.values)])
        np.testing.assert_array_equal(patches.grid, ours.grid[2])
    with pytest.raises(FileNotFoundError):
        cache(pair.folder / "absent.png")


@hypothesis.settings(max_examples=200)
@hypothesis.given(
    st.integers(1, 3000), st.integers(1, 3000), st.integers(1, 400), st.integers(0, 5000)
)
def test_sizes_and_their_bound_equal_the_reference(height, width, least, more):
    text = QwenConfig.from_hf(testing.tiny_qwen_config(testing.qwen_tokenizer())).text
    vision = QwenVisionConfig(32, 52, 1, 2, full_blocks=(0,), out_size=48)
    config = QwenConfig(vision, text, min_pixels=784 * least, max_pixels=784 * (least + more))
    bounds = {"min_pixels": config.min_pixels, "max_pixels": config.max_pixels}
    if max(height, width) > 200 * min(height, width):
        with pytest.raises(ValueError, match=f"{width} x {height} pixels is too narrow"):
            target_size(config, height, width)
        return
    ours = target_size(config, height, width)
    assert ours == smart_resize(height, width, **bounds)
    tokens = ours[0] * ours[1] // 784
    assert tokens <= config.max_image_tokens
    assert tokens <= padded_tokens(tokens) <= max(64, tokens * 5 / 4)


def test_windows_equal_the_reference():
    sides = [(1, 1), (2, 9), (4, 4), (5, 8), (9, 5), (3, 12), (7, 7), (0, 0)]
    layout = jax.jit(tower.lay_out_windows, static_argnums=(1, 2))(jnp.array(sides), 4, 64)
    for number, (rows, columns) in enumerate(sides[:-1]):
        n = rows * columns
        grid = torch.tensor([[1, 2 * rows, 2 * columns]])
        order, ends = get_vision_window_index(grid, 2, 112, 14)
        np.testing.assert_array_equal(layout.raster[number, :n], order)
        np.testing.assert_array_equal(layout.slot[number][order.numpy()], np.arange(n))
        lengths = np.diff(ends) // 4
        windows = np.asarray(layout.window[number])
        np.testing.assert_array_equal(np.unique(windows[:n], return_counts=True)[1], lengths)
        assert (np.diff(windows[:n]) >= 0).all() and (windows[n:] == -1).all()
        place = np.stack(np.divmod(np.asarray(layout.raster[number, :n]), columns))
        np.testing.assert_array_equal(layout.place[number, :, :n], place)


@functools.partial(jax.jit, static_argnames=("config", "taps", "execution"))
def encode(params, config, pixels, taps=(), execution=Execution()):
    return config.family.encode_image(params, config, pixels, taps, execution)


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
    config, taps = pair.model.config, (Tap("received", -1), Tap("keys", 2), Tap("hidden", 3))
    tokens, tapped = encode(pair.model.params, config, ours, taps)
    expected = by_hand(pair, theirs)
    for number, part in enumerate(features):
        assert_close(tokens[number, : len(part)], part)
        received, keys, hidden = expected[number]
        assert_close(tapped["received.-1"][number, : len(part)], received[:, 0])
        assert_close(tapped["keys.2"][number, : len(part)], keys)
        assert_close(tapped["hidden.3"][number, : len(part)], hidden)
        assert not tapped["received.-1"][number, len(part) :].any()
    with pytest.raises(
        ValueError, match=r"received\.1 belongs to a block that attends within windows"
    ):
        encode(pair.model.params, config, ours, (Tap("received", 1),))
    apart = lay_out(pair.model.params, "apart")
    padded = jax.tree.map(lambda x: np.concatenate([x, np.zeros_like(x[:1])]), ours)
    fused, _ = encode(apart, config, padded, execution=Execution(attention="xla"))
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


def assembled(pair, features, grid):
    """`ROWS` with all tokens of their images."""
    ids, length = pad_batch([row for row, _ in ROWS])
    shown = np.full((len(ROWS), 3), -1)
    for row, (_, images) in enumerate(ROWS):
        shown[row, : len(images)] = images
    counts = np.where(shown >= 0, np.prod(grid, 1)[shown], 0)
    index = np.broadcast_to(np.arange(features.shape[1], dtype=np.int32), (*shown.shape, 48))
    visual = vlm.Visual(
        features[shown], index < counts[..., None], index, index, jnp.asarray(grid)[shown]
    )
    place = jax.jit(vlm.assemble, static_argnames=("config", "capacity"))
    return place(pair.model.params, pair.model.config, ids, length, visual, capacity=128)


def expanded(pair, row, grid):
    """A row for the reference: ids, types, grids."""
    ids, images = ROWS[row]
    shown, out = iter(images), []
    for token in ids:
        count = int(np.prod(grid[next(shown)])) if token == S else 0
        out += [pair.raw["image_token_id"]] * count if count else [token]
    ids = torch.tensor([out])
    grids = torch.tensor([[1, *(2 * grid[number]).tolist()] for number in images])
    return ids, (ids == pair.raw["image_token_id"]).int(), grids if len(images) else None


def test_position_ids_and_logits_equal_the_reference(pair, seen):
    theirs, ours, _ = seen
    params, config = pair.model.params, pair.model.config
    tokens, _ = encode(params, config, ours, (Tap("received", -1), Tap("keys", 2)))
    sequence = assembled(pair, tokens, ours.grid)
    prefill = jax.jit(vlm.prefill, static_argnames=("config", "max_new_tokens", "all_logits"))
    logits = prefill(params, config, sequence, 1, all_logits=True).logits
    halved = jax.tree.map(lambda x: x.astype(jnp.bfloat16), (params, sequence.hidden))
    narrow = prefill(
        halved[0], config, sequence._replace(hidden=halved[1]), 1, all_logits=True
    ).logits
    for row, (_, images) in enumerate(ROWS):
        ids, types, grids = expanded(pair, row, ours.grid)
        length = ids.shape[1]
        assert sequence.length[row] == length
        position, delta = pair.torch.model.get_rope_index(ids, types, grids)
        np.testing.assert_array_equal(sequence.position[row, :, :length], position[:, 0])
        assert sequence.next_position[row] == length + int(delta[0, 0])
        pixels = torch.cat([by_image(theirs)[number] for number in images]) if images else None
        expected = logits_of_reference(pair, ids, pixels, grids)
        assert_close(logits[row, :length], expected, what=f"row {row}")
        assert error(narrow[row, :length].astype(jnp.float32), expected) < 0.06


def test_the_loss_of_answers_equals_the_reference(pair, seen):
    """Of two conversations whose images have 35 and 12 tokens."""
    theirs, ours, _ = seen
    config = pair.model.config
    encoder = ConversationEncoder(
        pair.model.tokenizer, QWEN2_5_VL.place_images, QWEN2_5_VL.conversation
    )
    turns, images = (("Red?", "No."), ("What?", "A dog.", "Why?", "So.")), (0, 2)
    limits = Limits(config.max_image_tokens, 400, 16)
    rows = [make_row(encoder.encode(said, 1), limits) for said in turns]
    assert [pair.model.tokenizer.decode(row.target) for row in rows] == [
        "No.<|im_end|>",
        "So.<|im_end|>",  # the last answer alone
    ]
    targets = stack_targets(rows, ours.grid[list(images)], 200, 32)
    tokens, _ = encode(pair.model.params, config, ours, (Tap("received", -1), Tap("keys", 2)))
    loss = jax.jit(lm_loss, static_argnums=(1, 2))(
        pair.model.params, config, ForwardOptions(), tokens[np.array(images)], targets
    )
    total = 0
    for row, number in zip(rows, images, strict=True):
        count = int(ours.grid[number].prod())
        at = row.ids.tolist().index(S)
        ids = [*row.ids[:at], *[pair.raw["image_token_id"]] * count, *row.ids[at + 1 :]]
        ids = torch.tensor([list(map(int, ids))])
        grid = theirs["image_grid_thw"][number : number + 1]
        logits = logits_of_reference(pair, ids, by_image(theirs)[number], grid)
        places = torch.tensor(row.place + count - 1)
        total += torch.nn.functional.cross_entropy(
            logits[places], torch.tensor(row.target).long(), reduction="sum"
        )
    np.testing.assert_allclose(loss, total / sum(len(row.target) for row in rows), rtol=1e-5)


def answer_of_reference(pair, prompt, shown, max_tokens, **options):
    """Greedy ids."""
    processor = Qwen2VLImageProcessorPil.from_pretrained(pair.folder)
    seen = processor(shown, return_tensors="pt") if shown else {}
    grids = seen.get("image_grid_thw")
    marks = [
        f"<|vision_start|>{'<|image_pad|>' * (int(grid.prod()) // 4)}<|vision_end|>"
        for grid in (() if grids is None else grids)
    ]
    text = (
        "<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n"
        f"<|im_start|>user\n{''.join(marks)}{prompt}<|im_end|>\n<|im_start|>assistant\n"
    )
    ids = pair.model.tokenizer(text, return_tensors="pt").input_ids
    pair.torch.model.rope_deltas = None
    answer = pair.torch.generate(
        input_ids=ids,
        mm_token_type_ids=(ids == pair.raw["image_token_id"]).int(),
        **seen,
        do_sample=False,
        max_new_tokens=max_tokens,
        eos_token_id=list(pair.model.config.eos_token_ids),
        pad_token_id=0,
        **options,
    )
    return answer[0, ids.shape[1] :].tolist()


def test_the_command_gives_the_ids_of_the_reference(pair, capsys):
    paths = []
    for number in (0, 1):
        paths += ["--image", str(pair.folder / f"{number}.png")]
        image(number).save(paths[-1])
    shown = [image(0), image(1)]
    command = ["--model", str(pair.folder), *paths, "--prompt", "Is it red?", "--json"]
    main([*command, "--dtype", "float32", "--max_tokens", "6"])
    answer = json.loads(capsys.readouterr().out)
    assert answer["token_ids"] == answer_of_reference(pair, "Is it red?", shown, 6)
    assert answer["visual_tokens"] == answer["kept"] == 35 + 22


def test_the_repetition_penalty_of_the_folder_is_that_of_the_reference(pair):
    """Published folders have one of 1.05; it counts prompt, image and answer, row by row."""
    file = pair.folder / "generation_config.json"
    file.write_text('{"repetition_penalty": 1.5}')
    try:
        model = load_vlm(pair.folder, dtype=jnp.float32, progress=False)
    finally:
        file.unlink()
    cases = [("Is it red?", [image(0)]), ("Is there a red one in it, or a blue one?", [])]
    prompts, shown = zip(*cases, strict=True)
    expected = [answer_of_reference(pair, *case, 8, repetition_penalty=1.5) for case in cases]
    options = RunOptions(max_tokens=8)
    answers = generate(model, prompts, shown, options=options)
    assert [list(answer.token_ids) for answer in answers] == expected
    unpenalised = Sampling(repetition_penalty=1)
    plain = generate(model, prompts, shown, sampling=unpenalised, options=options)
    assert [list(answer.token_ids) for answer in plain] != expected


@pytest.mark.slow
def test_one_block_of_the_tower_at_true_widths_equals_the_reference():
    fields = {"depth": 1, "hidden_size": 1280, "fullatt_block_indexes": [0]}
    theirs = transformers.models.qwen2_5_vl.configuration_qwen2_5_vl.Qwen2_5_VLVisionConfig(
        **fields
    )
    theirs._attn_implementation = "eager"
    block = randomise(reference.Qwen2_5_VLVisionBlock(theirs))
    config = QwenVisionConfig.from_hf(fields)
    weights = {name: weight.numpy() for name, weight in block.named_parameters()}

    def linear(name):
        return {"kernel": weights[f"{name}.weight"].T, "bias": weights[f"{name}.bias"]}

    params = {
        "norm1": {"scale": weights["norm1.weight"]},
        "attention": {"qkv": linear("attn.qkv"), "out": linear("attn.proj")},
        "norm2": {"scale": weights["norm2.weight"]},
        "mlp": {name: linear(f"mlp.{name}_proj") for name in ("gate", "up", "down")},
    }
    x = jnp.asarray(np.random.default_rng(0).standard_normal((1, 24, 1280), np.float32))
    layout = tower.lay_out_windows(jnp.array([[2, 3]]), config.window, 6)
    context = tower._context(config, layout)
    ours = jax.jit(tower.QwenVisionBlock(config).apply, static_argnums=3)(
        {"params": params}, x, context, True
    )
    angles = tuple(as_torch(part[0]) for part in (context.cosine, context.sine))
    rows = torch.tensor([[0, 0], [0, 1], [1, 0], [1, 1], [0, 2], [0, 3]])  # of the first patches
    expected = reference.Qwen2_5_VLVisionRotaryEmbedding(theirs)(torch.zeros(1), rows)
    for part, wanted in zip(angles, expected, strict=True):
        np.testing.assert_allclose(part[: len(rows)], wanted, atol=1e-6)
    expected = block(as_torch(x[0]), torch.tensor([0, 24]), position_embeddings=angles)
    assert_close(ours.hidden[0], expected)


@pytest.mark.slow
def test_one_layer_at_the_widths_of_the_3b_equals_the_reference():
    raw = testing.tiny_qwen_config(testing.qwen_tokenizer()) | {
        "hidden_size": 2048,
        "intermediate_size": 11008,
        "num_hidden_layers": 1,
        "num_attention_heads": 16,
        "num_key_value_heads": 2,
        "rope_scaling": {"type": "mrope", "mrope_section": [16, 24, 24]},
        "tie_word_embeddings": True,
    }
    raw["vision_config"]["out_hidden_size"] = 2048
    config = QwenConfig.from_hf(raw)
    theirs = transformers.Qwen2_5_VLConfig(**json.loads(json.dumps(raw))).text_config
    theirs._attn_implementation = "eager"
    layer = reference.Qwen2_5_VLDecoderLayer(theirs, 0)
    random = torch.Generator().manual_seed(0)
    for weight in layer.parameters():
        weight.data.normal_(0, 0.02, generator=random)
        weight.requires_grad_(False)
    weights = {name: weight.numpy() for name, weight in layer.named_parameters()}

    def linear(name, bias=False):
        kernel = {"kernel": weights[f"{name}.weight"].T[None]}
        return kernel | ({"bias": weights[f"{name}.bias"][None]} if bias else {})

    heads = {"query": "q", "key": "k", "value": "v"}
    attention = {ours: linear(f"self_attn.{name}_proj", True) for ours, name in heads.items()}
    layers = {
        "norm1": {"scale": weights["input_layernorm.weight"][None]},
        "attention": attention | {"out": linear("self_attn.o_proj")},
        "norm2": {"scale": weights["post_attention_layernorm.weight"][None]},
        "mlp": {name: linear(f"mlp.{name}_proj") for name in ("gate", "up", "down")},
    }
    hidden = np.random.default_rng(0).standard_normal((1, 6, 2048), np.float32)
    position = np.array([[[0, 1, 1, 1, 1, 3], [0, 1, 1, 2, 2, 3], [0, 1, 2, 1, 2, 3]]], np.int32)
    rows = Rows(jnp.asarray(hidden), jnp.asarray(position), jnp.ones((1, 6), bool))
    params = {"language": {"layers": layers}}
    ours = jax.jit(decoder.run_layers, static_argnums=(1, 3))(
        params["language"], config.text, rows, (0, 1)
    )
    angles = reference.Qwen2_5_VLRotaryEmbedding(theirs)(
        torch.zeros(1), as_torch(position).transpose(0, 1)
    )
    mask = torch.triu(torch.full((1, 1, 6, 6), -1e30), 1)
    expected = layer(as_torch(hidden), attention_mask=mask, position_embeddings=angles)
    assert_close(ours.hidden, expected)


@pytest.mark.parametrize("kind", ["published names", "new names in shards", "tied"])
def test_every_layout_is_loaded_and_written(tmp_path, kind):
    tied = kind == "tied"
    write = layouts.new_qwen if kind.startswith("new") else testing.tiny_qwen
    folder = write(tmp_path / "from", tie_word_embeddings=tied)
    model = load_vlm(folder, dtype=jnp.float32, max_pixels=1024, progress=False)
    assert ("head" in model.params["language"]) != tied
    assert model.config.max_pixels == 1024 and model.config.min_pixels == 256
    save_vlm(model, tmp_path / "to")
    again = load_vlm(tmp_path / "to", dtype=jnp.float32, progress=False)
    assert again.config == model.config
    assert again.image_settings == model.image_settings
    jax.tree.map(np.testing.assert_array_equal, again.params, model.params)
    theirs = transformers.Qwen2_5_VLForConditionalGeneration.from_pretrained(
        tmp_path / "to", dtype=torch.float32
    )
    weights = dict(theirs.named_parameters())
    qkv = weights["model.visual.blocks.2.attn.qkv.weight"].detach().numpy()
    np.testing.assert_array_equal(
        qkv.T, model.params["vision"]["layers"]["attention"]["qkv"]["kernel"][2]
    )


def conversation(*turns):
    return QWEN2_5_VL.conversation([QWEN2_5_VL.place_images(turns[0], 1), *turns[1:]])


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
    two = QWEN2_5_VL.place_images("<image> and <image>", 2)
    assert two == "<image> and <image>"
    assert QWEN2_5_VL.place_images("Both?", 2) == "<image><image>Both?"


@pytest.mark.parametrize("words", ["<|image_pad|>What?", "<|video_pad|>What?", "<image><image>?"])
def test_placeholders_that_do_not_match_are_refused(words):
    with pytest.raises(ValueError, match="the prompt has "):
        conversation(words)
