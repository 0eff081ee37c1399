"""Qwen3-VL beside `transformers`: pixels, tower, deep features, positions, logits and answers."""

import json
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import layouts
import numpy as np
import pytest
import torch
import transformers
from hf_reference import assert_close, random_reference
from quick import quick_or_slow
from small_world import drawn, glimpse
from tiny_qwen import qwen_tokenizer, tiny_qwen3, tiny_qwen3_config
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil
from transformers.models.qwen3_vl import modeling_qwen3_vl as reference
from views import rows, select, view
from visual import noise

from stepprune_jax.checkpoints.load import VLM, load_vlm
from stepprune_jax.checkpoints.save import save_vlm
from stepprune_jax.flops import traced_flops
from stepprune_jax.inference import RunOptions, Sampling, generate, trace_arrays
from stepprune_jax.models import vlm
from stepprune_jax.models.attention import Tap
from stepprune_jax.models.families import find_family
from stepprune_jax.models.qwen2_5_vl.images import padded_tokens
from stepprune_jax.models.qwen3_vl import Qwen3_VL
from stepprune_jax.models.rotary import pair_axes
from stepprune_jax.models.stack import unstack
from stepprune_jax.models.weights import join, separate
from stepprune_jax.policy import FeatureStats, Inputs, PolicyConfig, Progress
from stepprune_jax.policy.noise import gate_tokens
from stepprune_jax.pruning import LayerPruner
from stepprune_jax.pruning.sparsevlm import recycle
from stepprune_jax.registry import PRUNERS, build_pruner, weighted
from stepprune_jax.selectors import AutoSelectConfig
from stepprune_jax.selectors.visionselector import VisionSelectorConfig

# Sizes (height, width) that are rounded, reduced, enlarged, and narrow.
SIZES = ((50, 70), (20, 90), (9, 8), (64, 31))
TOKENS = (35, 22, 6, 32)
STEPS, E = 6, 48


class Pair(NamedTuple):
    """The reference and ours, with the same weights."""

    torch: Any
    folder: Path
    model: VLM


def make_pair(folder, **changes):
    folder = tiny_qwen3(folder, **changes)
    model = random_reference(transformers.Qwen3VLForConditionalGeneration, folder)
    return Pair(model, folder, load_vlm(folder, dtype=jnp.float32, progress=False))


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    return make_pair(tmp_path_factory.mktemp("qwen3"))


def image(number):
    """That of `SIZES`."""
    return noise(SIZES[number][0], SIZES[number])


class Seen(NamedTuple):
    """Images as both see them; of each the reference's features, those of deep mergers last."""

    theirs: Any
    ours: Any
    features: list[torch.Tensor]


@pytest.fixture(scope="module")
def seen(pair):
    images = [image(number) for number in range(len(SIZES))]
    theirs = Qwen2VLImageProcessorPil.from_pretrained(pair.folder)(images, return_tensors="pt")
    ours = pair.model.backbone.preprocess(pair.model.image_settings, images)
    found = pair.torch.model.visual(theirs["pixel_values"], grid_thw=theirs["image_grid_thw"])
    whole = torch.cat([found.pooler_output, *found.deepstack_features], dim=1)
    return Seen(theirs, ours, whole.split(list(TOKENS)))


TAPS = (Tap("received", -1), Tap("keys", 1), Tap("hidden", -1))


@pytest.fixture(scope="module")
def encode(pair):
    return jax.jit(pair.model.backbone.encode_image, static_argnames="taps")


@pytest.fixture(scope="module")
def tower(pair, seen, encode):
    """Our tokens and taps of the images."""
    return encode(pair.model.params, seen.ours, taps=TAPS)


def test_patches_and_grids_equal_the_reference_bit_by_bit(pair, seen):
    theirs, ours, _ = seen
    grid = theirs["image_grid_thw"].numpy()
    np.testing.assert_array_equal(ours.grid, grid[:, 1:] // 2)
    parts = np.split(theirs["pixel_values"].numpy(), np.cumsum(grid.prod(1))[:-1])
    values = pair.model.backbone.normalise(ours).values
    for patches, expected in zip(values, parts, strict=True):
        frames = expected.reshape(len(expected), 3, 2, 16)
        for frame in range(2):
            own = patches[: len(expected)].reshape(-1, 3, 16)
            np.testing.assert_array_equal(own, frames[:, :, frame])
        assert not patches[len(expected) :].any()


def by_hand(pair, theirs):
    """What the patches of the last block receive, keys of the middle one, the tower's result."""
    given, visual = {}, pair.torch.model.visual
    hooks = [
        block.attn.register_forward_pre_hook(
            lambda _, args, kwargs, at=at: given.update({at: (args[0], kwargs)}), with_kwargs=True
        )
        for at, block in enumerate(visual.blocks)
    ]
    found = visual(theirs["pixel_values"], grid_thw=theirs["image_grid_thw"])
    for hook in hooks:
        hook.remove()

    def turned(at):
        x, more = given[at]
        query, key, _ = visual.blocks[at].attn.qkv(x).reshape(len(x), 3, 2, 16).unbind(1)
        angles = more["position_embeddings"]
        return reference.apply_rotary_pos_emb_vision(query, key, *angles)

    (query, key), (_, middle) = turned(2), turned(1)
    counts, parts = [4 * count for count in TOKENS], []
    for q, k, other, hidden in zip(
        *(x.split(counts) for x in (query, key, middle, found.last_hidden_state)), strict=True
    ):
        weights = torch.softmax(torch.einsum("qhc,khc->hqk", q, k) / 4, dim=2)
        merged = weights.mean((0, 1)), other.mean(1), hidden
        parts.append([x.reshape(len(x) // 4, 4, -1).mean(1) for x in merged])
    return parts


def test_tower_mergers_and_taps_equal_the_reference(pair, seen, tower):
    tokens, tapped = tower
    assert tokens.shape == (
        4,
        padded_tokens(max(TOKENS), pair.model.config.max_image_tokens),
        3 * E,
    )
    assert pair.model.config.token_width == 3 * E and pair.model.config.feature_width == E
    expected = by_hand(pair, seen.theirs)
    for number, part in enumerate(seen.features):
        for of in range(3):  # merged, and each of two deep features
            own = slice(of * E, (of + 1) * E)
            assert_close(tokens[number, : len(part), own], part[:, own])
        received, keys, hidden = expected[number]
        assert_close(tapped["received.-1"][number, : len(part)], received[:, 0])
        assert_close(tapped["keys.1"][number, : len(part)], keys)
        assert_close(tapped["hidden.-1"][number, : len(part)], hidden)
        assert not tapped["received.-1"][number, len(part) :].any()
    assert pair.model.config.received_block == 2
    assert pair.model.config.global_blocks == (0, 1, 2)


def test_images_of_any_aspect_share_programs(pair, encode, seen, tower):
    """The bounds allow two padded sizes; the fixture `tower` has compiled one."""
    before = encode._cache_size()
    for size in ((50, 70), (70, 50), (33, 60), (90, 24), (24, 90), (20, 20), (12, 12), (10, 60)):
        pixels = pair.model.backbone.preprocess(pair.model.image_settings, 4 * [noise(1, size)])
        encode(pair.model.params, pixels, taps=TAPS)
    assert encode._cache_size() - before == 1


# Prompt, and numbers of its images.
ASKED = (
    *(("What is this?", (number,)) for number in range(4)),
    ("red", (0, 1)),
    ("is the red dog in <image> or in <image>?", (3, 2)),
    ("two", (1, 1)),
    ("three", (2, 3, 1)),
    ("What is in this picture? " * 3, (1,)),
    ("yes or no", ()),
    ("a dog?", ()),
    ("Is it red?", (0,)),
)


def inputs_of_reference(pair, seen, prompt, numbers):
    """A prompt as the published template writes it, with as many places as there are tokens."""
    mark = "<|vision_start|><image><|vision_end|>"
    said = prompt if "<image>" in prompt else "<image>" * len(numbers) + prompt
    text = f"<|im_start|>user\n{said}<|im_end|>\n<|im_start|>assistant\n".replace("<image>", mark)
    for number in numbers:
        text = text.replace("<image>", "<|image_pad|>" * TOKENS[number], 1)
    ids = torch.tensor([pair.model.tokenizer(text).input_ids])
    kind = (ids == pair.model.config.image_token_id).int()
    inputs = {"input_ids": ids, "mm_token_type_ids": kind}
    if numbers:
        parts = seen.theirs["pixel_values"].split([4 * count for count in TOKENS])
        inputs["image_grid_thw"] = seen.theirs["image_grid_thw"][list(numbers)]
        inputs["pixel_values"] = torch.cat([parts[number] for number in numbers])
    pair.torch.model.rope_deltas = None
    return inputs


def answers(model, asked, *arguments, **options):
    """Ours, without an end."""
    prompts = [prompt for prompt, _ in asked]
    shown = [[image(number) for number in numbers] for _, numbers in asked]
    how = {"sampling": Sampling(stop_ids=()), "options": RunOptions(STEPS)}
    return generate(model, prompts, shown, *arguments, **how, **options)


def test_answers_positions_and_logits_equal_the_reference(pair, seen):
    """All in one batch, of which each row is as if alone."""
    traces = []
    found = answers(pair.model, ASKED, trace=traces.append)
    for row, ((prompt, numbers), answer) in enumerate(zip(ASKED, found, strict=True)):
        inputs = inputs_of_reference(pair, seen, prompt, numbers)
        arrays = trace_arrays(traces[0], row)
        position, _ = pair.torch.model.get_rope_index(
            inputs["input_ids"], inputs["mm_token_type_ids"], inputs.get("image_grid_thw")
        )
        np.testing.assert_array_equal(arrays["position_0"], position[:, 0])
        assert_close(arrays["logits"], pair.torch(**inputs).logits[0, -1], what=prompt)
        made = pair.torch.generate(
            **inputs, max_new_tokens=STEPS, do_sample=False, eos_token_id=None
        )
        assert list(answer.token_ids) == made[0, inputs["input_ids"].shape[1] :].tolist(), prompt


def test_a_batch_without_images_has_no_deep_features(pair):
    """It has no place for an image, either."""
    none = jnp.zeros((1, 0, 1), jnp.int32)
    visual = vlm.Visual(
        jnp.zeros((1, 0, 1, 3 * E)), none > 0, none, none, jnp.zeros((1, 0, 2), jnp.int32)
    )
    place = jax.jit(vlm.assemble, static_argnames="backbone")
    ids = jnp.array([[1, 4, 5]])
    found = place(pair.model.params, pair.model.backbone, ids, jnp.array([3]), visual)
    assert found.hidden.shape == (1, 3, E) and found.deep.shape == (1, 3, 2, E)
    assert not found.deep.any()


def layers_of_reference(pair, seen, kept, before=0):
    """Logits at the end of "Is it red?", about image 0 of which some tokens remain.

    The others are dropped before a layer of the language model.
    """
    language = pair.torch.model.language_model
    inputs = inputs_of_reference(pair, seen, "Is it red?", (0,))
    whole, visual = seen.features[0], inputs["mm_token_type_ids"][0].bool()
    position, _ = pair.torch.model.get_rope_index(
        inputs["input_ids"], inputs["mm_token_type_ids"], inputs["image_grid_thw"]
    )
    hidden = language.embed_tokens(inputs["input_ids"])
    hidden[0, visual] = whole[:, :E]
    remain = ~visual
    remain[torch.nonzero(visual)[:, 0][torch.tensor(kept)]] = True
    deep = torch.zeros(2, len(visual), E)
    deep[:, visual] = whole[:, E:].reshape(-1, 2, E).transpose(0, 1)
    for number, layer in enumerate(language.layers):
        if number == before:
            hidden, position, deep = hidden[:, remain], position[..., remain], deep[:, remain]
        angles = language.rotary_emb(hidden, position)
        s = hidden.shape[1]
        mask = torch.full((s, s), torch.finfo(torch.float32).min).triu(1)[None, None]
        hidden = layer(hidden, position_embeddings=angles, attention_mask=mask)
        if number < 2:
            hidden = hidden + deep[number]
    return pair.torch.lm_head(language.norm(hidden))[0, -1]


CHOICES = (
    ("divprune", {}, 0),
    # Before the layer behind which the second deep features are added, and behind all of them.
    ("fastv", {"layer": 1}, 1),
    pytest.param("fastv", {"layer": 2}, 2, marks=pytest.mark.slow),
)


@pytest.mark.parametrize(("name", "options", "before"), CHOICES)
def test_deep_features_of_kept_tokens_alone_are_added(pair, seen, name, options, before):
    traces = []
    answers(pair.model, ASKED[-1:], build_pruner(name, 9, options=options), trace=traces.append)
    arrays = trace_arrays(traces[0])
    kept = arrays[f"kept_{int(before > 0)}"]
    assert len(kept) == 9
    assert_close(arrays["logits"], layers_of_reference(pair, seen, kept, before))


def test_joined_and_unrolled_weights_give_the_same_logits(pair, seen, tower):
    """As on a GPU: matrices side by side, one layer after the other."""
    params, config = pair.model.params, pair.model.config
    tokens, grid = tower[0][:1, None], jnp.asarray(seen.ours.grid[:1])[:, None]
    index = jnp.arange(tokens.shape[2], dtype=jnp.int32)[None, None]
    visual = vlm.Visual(tokens, index < TOKENS[0], index, index, grid)
    joined = join(jax.tree.map(jnp.copy, params))
    ids, length = jnp.array([[1, vlm.IMAGE_TOKEN, 5]]), jnp.array([3])

    @jax.jit
    def logits(params):
        sequence = vlm.assemble(params, pair.model.backbone, ids, length, visual)
        return vlm.prefill(params, config, sequence, 1).logits

    assert_close(logits(unstack(joined)), logits(params))
    abstract = vlm.abstract_params(pair.model.backbone)
    jax.tree.map(np.testing.assert_array_equal, separate(joined, abstract), params)


@pytest.mark.slow
def test_published_widths_equal_the_reference(tmp_path):
    """One block of the tower, and one layer of the 2B, with the published table and sections."""
    tower = {"depth": 1, "deepstack_visual_indexes": [0], "hidden_size": 1024, "num_heads": 16}
    tower |= {"intermediate_size": 4096, "out_hidden_size": 2048, "patch_size": 16}
    raw = tiny_qwen3_config(qwen_tokenizer())
    text = raw["text_config"] | {"hidden_size": 2048, "intermediate_size": 6144, "head_dim": 128}
    text |= {"num_attention_heads": 16, "num_key_value_heads": 8, "num_hidden_layers": 1}
    text |= {"rope_theta": 5e6, "rope_scaling": {"rope_type": "default"}}
    pair = make_pair(
        tmp_path,
        vision_config=tower,
        text_config=text | {"tie_word_embeddings": True},
        tie_word_embeddings=True,
        min_pixels=64 * 32 * 32,
        max_pixels=80 * 32 * 32,
    )
    assert pair.model.config.vision.side == 48
    assert pair.model.config.text.rope_sections == (24, 20, 20)
    shown, traces = noise(0, (300, 260)), []
    generate(pair.model, ["red"], [shown], options=RunOptions(1), trace=traces.append)
    theirs = Qwen2VLImageProcessorPil.from_pretrained(pair.folder)([shown], return_tensors="pt")
    count = int(theirs["image_grid_thw"].prod()) // 4
    text = "<|im_start|>user\n<|vision_start|>" + "<|image_pad|>" * count
    text += "<|vision_end|>red<|im_end|>\n<|im_start|>assistant\n"
    ids = torch.tensor([pair.model.tokenizer(text).input_ids])
    kind = (ids == pair.model.config.image_token_id).int()
    logits = pair.torch(input_ids=ids, mm_token_type_ids=kind, **theirs).logits[0, -1]
    assert_close(trace_arrays(traces[0])["logits"], logits)


# Those that need no published weights; their taps, and what they cannot do here.
NEED_CLASS_TOKEN = ("cls", "prumerge", "prumerge_plus")
NAMES = [x for x in PRUNERS if x not in {*NEED_CLASS_TOKEN, *weighted()}]
BEFORE = [name for name in NAMES if not issubclass(PRUNERS[name], LayerPruner)]


SMALL = {"feature_width": E, "text_width": E, "width": 16, "num_heads": 2, "mlp_ratio": 2}
CONFIGS = {
    "stepprune": PolicyConfig(**SMALL, encoder_layers=1, decoder_layers=1),
    "autoselect": AutoSelectConfig(**SMALL, encoder_layers=1),
    "visionselector": VisionSelectorConfig(E, hidden_dim=8),
    "glimpseprune": glimpse(feature_width=E),
}


def own_policy(name="stepprune"):
    """Random weights of a trained method; None for others."""
    if name not in CONFIGS:
        return None
    empty = PRUNERS[name](config=CONFIGS[name])
    return empty.replace(params=drawn(empty.specs(), 1))


@pytest.mark.parametrize("name", [*BEFORE, "stepprune"])
def test_deep_features_follow_their_token(name):
    """Deep features that are -2 times their token remain so, be it gathered or averaged."""
    random = np.random.default_rng(0)
    tokens = random.standard_normal((2, 12, E)).astype(np.float32)
    score = random.random((2, 12)).astype(np.float32)
    taps = {"visionzip": (score, tokens[..., :4]), "holov": (score,), "hiprune": (score, score)}
    others = {"grid": np.array([[3, 4], [3, 3]], np.int32), "deep": -2 * tokens}
    others |= {"valid": np.arange(12) < np.array([[12], [9]])}
    others |= {"text": np.ones((2, 1, E), np.float32), "text_valid": np.ones((2, 1), bool)}
    shown = view(tokens, *taps.get(name, ()), count=[12, 9] if name == "all" else 4, **others)
    pruner = build_pruner(name, None if name == "all" else 4, policy=own_policy(name))
    kept = select(pruner.program(), shown, 12 if name == "all" else 5)
    assert kept.tokens.shape[2] == 2 * E and kept.count.tolist() == shown.count.tolist()
    np.testing.assert_allclose(kept.tokens[..., E:], -2 * kept.tokens[..., :E], atol=1e-5)
    assert np.abs(kept.tokens[:, 0]).max(1).all()


def test_recycled_tokens_average_their_deep_features():
    random = np.random.default_rng(0)
    hidden = random.standard_normal((1, 14, 4)).astype(np.float32)
    image = np.where(np.arange(14) < 12, 0, -1)[None]
    before = rows(image, hidden)._replace(note=jnp.zeros((1, 14)))
    before = before._replace(deep=-2 * before.hidden[:, :, None])
    score = jnp.asarray(random.random((1, 14)), jnp.float32)
    after, remain = jax.jit(recycle, static_argnums=3)(before, score, jnp.array([[4]]), 0.0)
    assert remain.sum() == 4 + 1 + 2  # of 3 candidates of 8 dropped ones, one cluster
    assert after.index[0, 4] == -1 and after.image[0, 4] == 0
    np.testing.assert_allclose(after.deep[:, :, 0], -2 * after.hidden, atol=1e-5)


OPTIONS = {name: {"layer": 1} for name in ("fastv", "topv", "dart")}
OPTIONS |= {
    name: {"average": False} for name in ("clse", "pyramiddrop", "sparsevlm", "sparsevlm_v2")
}


@pytest.mark.parametrize("name", quick_or_slow([*NAMES, *CONFIGS], ["visionzip"]))
def test_pruners_keep_their_budget(pair, name):
    budget = None if name == "all" else 5
    pruner = build_pruner(name, budget, policy=own_policy(name), options=OPTIONS.get(name))
    asked = ASKED[4], ASKED[6]
    for (_, numbers), answer in zip(asked, answers(pair.model, asked, pruner), strict=True):
        whole = sum(TOKENS[number] for number in numbers)
        assert answer.visual_tokens == whole
        kept = {"all": whole, "dart": 4 * len(numbers)}  # in turns of eight pivots
        assert answer.kept == kept.get(name, 5 * len(numbers))


@pytest.mark.parametrize("name", NEED_CLASS_TOKEN)
def test_pruners_that_need_a_class_token_are_refused(pair, name):
    config = pair.model.config
    with pytest.raises(ValueError, match=f"^{name}: "):
        build_pruner(name, 5).check(config, config.max_image_tokens)


def gated(alpha, deep, stats):
    chosen = own_policy()
    inputs = Inputs(jnp.ones((2, 3, E)), deep=deep, deep_stats=stats)
    return gate_tokens(chosen.params, chosen.config, jax.random.key(0), inputs, alpha)


def test_the_noise_gate_hides_the_deep_features_of_dropped_tokens():
    random = np.random.default_rng(0)
    deep = jnp.asarray(50 + 3 * random.standard_normal((2, 3, 400)), jnp.float32)
    stats = FeatureStats(jnp.full(400, 50.0), jnp.full(400, 9.0), jnp.float32(1))
    alpha = jnp.array([[1.0, 0, 1], [0, 0, 1]])
    run = jax.jit(gated)
    whole = run(alpha, deep, stats)
    assert whole.shape == (2, 3, E + 400)
    found, is_open = np.asarray(whole[..., E:]), np.asarray(alpha) > 0
    np.testing.assert_allclose(found[is_open], np.asarray(deep)[is_open], rtol=1e-5)
    other = jnp.where(alpha[..., None] > 0, deep, deep + 7)
    np.testing.assert_array_equal(run(alpha, other, stats), whole)
    hidden = found[~is_open]  # noise of the mean and the deviation of the features
    assert abs(hidden.mean() - 50) < 0.3 and abs(hidden.std() - 3) < 0.2
    slope = jax.jit(jax.grad(lambda x: run(alpha, x, stats).sum()))(deep)
    np.testing.assert_array_equal(np.abs(slope).max(2) > 0, is_open)


def test_the_gates_of_visionselector_scale_deep_features_as_their_tokens():
    tokens = jnp.asarray(np.random.default_rng(0).standard_normal((2, 6, E)), jnp.float32)
    inputs, chosen, seen = Inputs(tokens, deep=-2 * tokens), own_policy("visionselector"), []

    @jax.jit
    def run(inputs):
        chosen.loss(jax.random.key(0), inputs, lambda x: seen.append(x) or x.sum(), Progress())
        return seen.pop()

    gated = run(inputs)
    np.testing.assert_allclose(gated[..., E:], -2 * gated[..., :E], rtol=1e-5)
    assert (np.abs(gated) < np.abs(inputs.whole)).all()


def test_operations_are_those_of_the_program(pair):
    backbone, params = pair.model.backbone, vlm.abstract_params(pair.model.backbone, jnp.float32)
    pixels = pair.model.backbone.preprocess(pair.model.image_settings, [noise(0, (32, 32))])
    traced = jax.make_jaxpr(lambda p, x: backbone.encode_image(p, x)[0])(params, pixels)
    assert pixels.grid.tolist() == [[4, 4]] and pixels.values.shape[1] == 64  # no padding
    assert traced_flops(traced) == sum(backbone.vision_flops((4, 4)).values())


# Files.


@pytest.mark.parametrize("tied", [False, True])
def test_folders_are_loaded_and_written(tmp_path, tied):
    config = tiny_qwen3_config(qwen_tokenizer())
    changes = {"tie_word_embeddings": tied}
    changes["text_config"] = config["text_config"] | {"tie_word_embeddings": tied}
    folder = tiny_qwen3(tmp_path / "from", **changes)
    model = load_vlm(folder, dtype=jnp.float32, max_pixels=1024, progress=False)
    assert ("head" in model.params["language"]) != tied
    assert model.config.max_pixels == 1024 and model.config.min_pixels == 256
    save_vlm(model, tmp_path / "to")
    again = load_vlm(tmp_path / "to", dtype=jnp.float32, progress=False)
    assert again.config == model.config and again.image_settings == model.image_settings
    jax.tree.map(np.testing.assert_array_equal, again.params, model.params)
    theirs, report = transformers.Qwen3VLForConditionalGeneration.from_pretrained(
        tmp_path / "to", output_loading_info=True
    )
    assert not any(report[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    deep = theirs.model.visual.deepstack_merger_list[1].linear_fc2.weight.detach()
    np.testing.assert_array_equal(model.params["deep_mergers"]["down"]["kernel"][1].T, deep)
    # As newer `transformers` write it.
    theirs.config.save_pretrained(tmp_path / "new")
    raw = json.loads((tmp_path / "new" / "config.json").read_text())
    assert "rope_parameters" in raw["text_config"]
    newer = Qwen3_VL.read(raw, None).config
    assert newer.text == model.config.text and newer.vision == model.config.vision


REFUSED = (
    ({"model_type": "qwen3_vl_moe"}, "'qwen3_vl_moe', a mixture of experts.* expected 'qwen3_vl'"),
    ({"vision": {"deepstack_visual_indexes": [0, 3]}}, r"\[0, 3\], expected ascending .* has 3"),
    ({"vision": {"deepstack_visual_indexes": [1, 0]}}, r"\[1, 0\], expected ascending"),
    ({"text": {"num_hidden_layers": 1}}, "2 numbers, expected at most one for each of the 1 layer"),
    ({"vision": {"num_position_embeddings": 24}}, "24 is not the square of an integer"),
    ({"vision": {"hidden_act": "gelu"}}, "hidden_act is 'gelu', expected 'gelu_pytorch_tanh'"),
    ({"vision": {"rope_parameters": {"rope_type": "default"}}}, "rope_type is 'default', expected"),
    ({"vision": {"out_hidden_size": 32}}, "out_hidden_size 32 .* is not the hidden_size 48"),
    ({"text": {"attention_bias": True}}, "attention_bias is True, expected False"),
    ({"text": {"head_dim": 12}}, r"mrope_section \[4, 2, 2\] does not add up to half of head_dim"),
    ({"text": {"rope_scaling": {"mrope_interleaved": False}}}, "mrope_interleaved is False"),
    ({"vision_config": None}, "vision_config is missing, expected an object"),
)


@pytest.mark.parametrize(("changes", "message"), REFUSED)
def test_a_field_is_refused_by_name(changes, message):
    raw = tiny_qwen3_config(qwen_tokenizer())
    for name, value in changes.items():
        part = f"{name}_config"
        raw |= {part: raw[part] | value} if name in ("text", "vision") else {name: value}
    with pytest.raises(ValueError, match=message) as refused:
        find_family(raw, "here").read(raw, None)
    assert "\n" not in str(refused.value)


def test_a_folder_of_another_family_names_those_that_are_supported():
    raw = {"model_type": "qwen3_5", "architectures": ["Qwen3_5ForConditionalGeneration"]}
    with pytest.raises(ValueError, match=r"supported: .*Qwen3-VL without experts") as refused:
        find_family(raw, "here")
    assert "docs/architecture.md" in str(refused.value) and "\n" not in str(refused.value)


def test_weights_that_do_not_fit_are_listed(pair, tmp_path):
    tensors = layouts.rename(tiny_qwen3(tmp_path), ())
    layouts.testing.write_tensors(
        tmp_path,
        {
            name.replace("deepstack_merger_list.1", "deepstack_merger_list.2"): x
            for name, x in tensors.items()
        },
    )
    with pytest.raises(ValueError, match=r"deepstack_merger_list\.1\.norm\.weight") as refused:
        load_vlm(tmp_path, progress=False)
    assert "missing (6)" in str(refused.value) and "unused (6)" in str(refused.value)


def test_int8_weights_leave_norms_as_they_are(pair):
    rounded = load_vlm(pair.folder, dtype=jnp.float32, weights="int8", progress=False)
    found, whole = (model.params["language"]["layers"] for model in (rounded, pair.model))
    for name in ("query_norm", "key_norm"):
        scale = found["attention"][name]["scale"]
        np.testing.assert_array_equal(scale, whole["attention"][name]["scale"])
    assert found["attention"]["query"]["kernel"].value.dtype == jnp.int8


def test_sections_take_turns():
    assert pair_axes((4, 2, 2)).tolist() == [0, 1, 2, 0, 1, 2, 0, 0]
    published = pair_axes((24, 20, 20))
    assert np.flatnonzero(published == 1).tolist() == list(range(1, 60, 3))
    assert np.flatnonzero(published == 2).tolist() == list(range(2, 60, 3))


def test_prompts_are_those_of_the_chat_template():
    start = (
        "<|im_start|>user\n<|vision_start|><image><|vision_end|>What?<|im_end|>\n"
        "<|im_start|>assistant\n"
    )
    turns = [Qwen3_VL.place_images("What?", 1), "A dog.", "Why?"]
    closed = start + "A dog.<|im_end|>"
    assert Qwen3_VL.conversation(turns[:1]) == start
    assert Qwen3_VL.conversation(turns[:2]) == closed
    asked = "\n<|im_start|>user\nWhy?<|im_end|>\n<|im_start|>assistant\n"
    assert Qwen3_VL.conversation(turns) == closed + asked
    own = "<|im_start|>system\nBe brief.<|im_end|>\n" + start
    assert Qwen3_VL.conversation(turns[:1], "Be brief.") == own
    with pytest.raises(ValueError, match=r"<\|video_pad\|>, but videos are not supported"):
        Qwen3_VL.conversation(["<|video_pad|>What?"])
