"""Qwen3-VL equals `transformers`: pixels, tower, DeepStack features, positions and answers."""

import json
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
import transformers
from hf_reference import (
    assert_close,
    assert_patches_equal,
    assert_taps_equal,
    make_pair,
    qwen_inputs,
    save_and_reload,
)
from quick import quick_or_slow
from small_world import glimpse, random_params
from tiny_qwen import qwen_tokenizer, tiny_qwen3, tiny_qwen3_config
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil
from transformers.models.qwen3_vl import modeling_qwen3_vl as reference
from views import rows, select, view
from visual import kept_at, noise

from stepprune_jax.checkpoints.load import load_vlm
from stepprune_jax.data.prompts import IMAGE_TOKEN
from stepprune_jax.flops import traced_flops
from stepprune_jax.inference import RunOptions, Sampling, generate, trace_arrays
from stepprune_jax.models import vlm
from stepprune_jax.models.assembly import assemble
from stepprune_jax.models.attention import Tap
from stepprune_jax.models.families import find_family
from stepprune_jax.models.qwen2_5_vl.images import num_padded_tokens
from stepprune_jax.models.qwen3_vl import Qwen3_VL
from stepprune_jax.models.stack import unstack
from stepprune_jax.models.weights import join_kernels, separate_kernels
from stepprune_jax.policy import FeatureStats, Inputs, PolicyConfig, Progress
from stepprune_jax.policy.noise import gate_tokens
from stepprune_jax.pruning import LayerPruner
from stepprune_jax.pruning.sparsevlm import recycle
from stepprune_jax.registry import PRUNERS, build_pruner, weighted
from stepprune_jax.selectors import AutoSelectConfig
from stepprune_jax.selectors.visionselector import VisionSelectorConfig

# (height, width) of images that are rounded, reduced, enlarged, and narrow; their token counts.
SIZES = ((50, 70), (20, 90), (9, 8), (64, 31))
TOKENS = (35, 22, 6, 32)
STEPS, E = 6, 48
MODEL = transformers.Qwen3VLForConditionalGeneration


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    return make_pair(MODEL, tiny_qwen3(tmp_path_factory.mktemp("qwen3")))


def image(number):
    """Returns a random image with the size of a number in `SIZES`."""
    return noise(SIZES[number][0], SIZES[number])


class Processed(NamedTuple):
    """Images, processed by both implementations, and the reference's features of each image.

    The features of a token are followed by its DeepStack features.
    """

    theirs: Any
    ours: Any
    features: list[torch.Tensor]


@pytest.fixture(scope="module")
def processed(pair):
    images = [image(number) for number in range(len(SIZES))]
    theirs = Qwen2VLImageProcessorPil.from_pretrained(pair.folder)(images, return_tensors="pt")
    ours = pair.model.backbone.preprocess(pair.model.image_settings, images)
    output = pair.torch.model.visual(theirs["pixel_values"], grid_thw=theirs["image_grid_thw"])
    features = torch.cat([output.pooler_output, *output.deepstack_features], dim=1)
    return Processed(theirs, ours, features.split(list(TOKENS)))


TAPS = (Tap("received", -1), Tap("keys", 1), Tap("hidden", -1))


@pytest.fixture(scope="module")
def encode(pair):
    return jax.jit(pair.model.backbone.encode_image, static_argnames="taps")


@pytest.fixture(scope="module")
def tower(pair, processed, encode):
    """Computes our tokens and taps of the images."""
    return encode(pair.model.params, processed.ours, taps=TAPS)


def test_patches_and_grids_equal_the_reference_bit_for_bit(pair, processed):
    theirs, ours, _ = processed
    np.testing.assert_array_equal(ours.grid, theirs["image_grid_thw"][:, 1:] // 2)
    assert_patches_equal(pair.model.backbone.normalise(ours).values, theirs)


def taps_of_reference(pair, theirs):
    """Computes the taps of `TAPS` for each image with the reference's tower."""
    attention_inputs, visual = {}, pair.torch.model.visual
    hooks = [
        block.attn.register_forward_pre_hook(
            lambda _, args, kwargs, number=number: attention_inputs.update(
                {number: (args[0], kwargs)}
            ),
            with_kwargs=True,
        )
        for number, block in enumerate(visual.blocks)
    ]
    output = visual(theirs["pixel_values"], grid_thw=theirs["image_grid_thw"])
    for hook in hooks:
        hook.remove()

    def rotated_query_and_key(number):
        hidden_input, keywords = attention_inputs[number]
        qkv = visual.blocks[number].attn.qkv(hidden_input)
        query, key, _ = qkv.reshape(len(hidden_input), 3, 2, 16).unbind(1)
        angles = keywords["position_embeddings"]
        return reference.apply_rotary_pos_emb_vision(query, key, *angles)

    (query, key), (_, middle_key) = rotated_query_and_key(2), rotated_query_and_key(1)
    counts, results = [4 * count for count in TOKENS], []
    for q, k, other_key, hidden in zip(
        *(array.split(counts) for array in (query, key, middle_key, output.last_hidden_state)),
        strict=True,
    ):
        weights = torch.softmax(torch.einsum("qhc,khc->hqk", q, k) / 4, dim=2)
        patch_values = weights.mean((0, 1)), other_key.mean(1), hidden
        results.append([values.reshape(len(values) // 4, 4, -1).mean(1) for values in patch_values])
    return results


def test_tower_mergers_and_taps_equal_the_reference(pair, processed, tower):
    tokens, tapped = tower
    num_padded = num_padded_tokens(max(TOKENS), pair.model.config.max_image_tokens)
    assert tokens.shape == (4, num_padded, 3 * E)
    assert pair.model.config.token_width == 3 * E and pair.model.config.feature_width == E
    expected = taps_of_reference(pair, processed.theirs)
    for number, feature in enumerate(processed.features):
        for level in range(3):  # the token and its two DeepStack features
            channels = slice(level * E, (level + 1) * E)
            assert_close(tokens[number, : len(feature), channels], feature[:, channels])
        assert_taps_equal(tapped, 1, number, expected[number])
    assert pair.model.config.received_block == 2
    assert pair.model.config.global_blocks == (0, 1, 2)


def test_images_of_any_aspect_ratio_share_two_programs(pair, encode, processed, tower):
    """The area bounds allow two padded sizes; the fixture `tower` compiles one of the programs."""
    size_before = encode._cache_size()
    for size in ((50, 70), (70, 50), (33, 60), (90, 24), (24, 90), (20, 20), (12, 12), (10, 60)):
        pixels = pair.model.backbone.preprocess(pair.model.image_settings, 4 * [noise(1, size)])
        encode(pair.model.params, pixels, taps=TAPS)
    assert encode._cache_size() - size_before == 1


# Prompts with the numbers of their images in `SIZES`.
QUESTIONS = (
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


def inputs_of_reference(pair, processed, prompt, numbers):
    """Returns the reference's inputs for a prompt, with one id per visual token."""
    message = prompt if "<image>" in prompt else "<image>" * len(numbers) + prompt
    text = f"<|im_start|>user\n{message}<|im_end|>\n<|im_start|>assistant\n"
    for number in numbers:
        pads = "<|image_pad|>" * TOKENS[number]
        text = text.replace("<image>", f"<|vision_start|>{pads}<|vision_end|>", 1)
    return qwen_inputs(pair, pair.model.tokenizer(text).input_ids, processed.theirs, numbers)


def ask(model, questions, *arguments, **options):
    """Generates our answers of `STEPS` tokens, without stop tokens."""
    prompts = [prompt for prompt, _ in questions]
    images = [[image(number) for number in numbers] for _, numbers in questions]
    common_options = {"sampling": Sampling(stop_ids=()), "options": RunOptions(STEPS)}
    return generate(model, prompts, images, *arguments, **common_options, **options)


@pytest.mark.supports("qwen3_vl", "answer")
def test_answers_positions_and_logits_equal_the_reference(pair, processed):
    """All questions are one batch; each row equals the reference's answer to one question."""
    traces = []
    results = ask(pair.model, QUESTIONS, trace=traces.append)
    for row, ((prompt, numbers), answer) in enumerate(zip(QUESTIONS, results, strict=True)):
        inputs = inputs_of_reference(pair, processed, prompt, numbers)
        arrays = trace_arrays(traces[0], row)
        position, _ = pair.torch.model.get_rope_index(
            inputs["input_ids"], inputs["mm_token_type_ids"], inputs.get("image_grid_thw")
        )
        np.testing.assert_array_equal(arrays["position_0"], position[:, 0])
        assert_close(arrays["logits"], pair.torch(**inputs).logits[0, -1], what=prompt)
        output = pair.torch.generate(
            **inputs, max_new_tokens=STEPS, do_sample=False, eos_token_id=None
        )
        assert list(answer.token_ids) == output[0, inputs["input_ids"].shape[1] :].tolist(), prompt


def test_a_batch_without_images_has_zero_deepstack_features(pair):
    """The batch also has no slots for images."""
    no_images = jnp.zeros((1, 0, 1), jnp.int32)
    kept = kept_at(jnp.zeros((1, 0, 1, 3 * E)), no_images > 0, no_images)
    grid, ids = jnp.zeros((1, 0, 2), jnp.int32), jnp.array([[1, 4, 5]])
    run = jax.jit(assemble, static_argnames="backbone")
    params, backbone = pair.model.params, pair.model.backbone
    sequence = run(params, backbone, ids, jnp.array([3]), kept, grid)
    assert sequence.hidden.shape == (1, 3, E) and sequence.deep.shape == (1, 3, 2, E)
    assert not sequence.deep.any()


def pruned_logits_of_reference(pair, processed, kept, before=0):
    """Computes the reference's logits after "Is it red?" if only some tokens of image 0 are kept.

    Args:
        pair: both models.
        processed: the processed images.
        kept: indices of the kept tokens.
        before: layer of the language model before which all other tokens are dropped.
    """
    language = pair.torch.model.language_model
    inputs = inputs_of_reference(pair, processed, "Is it red?", (0,))
    features, visual = processed.features[0], inputs["mm_token_type_ids"][0].bool()
    position, _ = pair.torch.model.get_rope_index(
        inputs["input_ids"], inputs["mm_token_type_ids"], inputs["image_grid_thw"]
    )
    hidden = language.embed_tokens(inputs["input_ids"])
    hidden[0, visual] = features[:, :E]
    is_kept = ~visual
    is_kept[torch.nonzero(visual)[:, 0][torch.tensor(kept)]] = True
    deep = torch.zeros(2, len(visual), E)
    deep[:, visual] = features[:, E:].reshape(-1, 2, E).transpose(0, 1)
    for number, layer in enumerate(language.layers):
        if number == before:
            hidden, position, deep = hidden[:, is_kept], position[..., is_kept], deep[:, is_kept]
        angles = language.rotary_emb(hidden, position)
        s = hidden.shape[1]
        mask = torch.full((s, s), torch.finfo(torch.float32).min).triu(1)[None, None]
        hidden = layer(hidden, position_embeddings=angles, attention_mask=mask)
        if number < 2:
            hidden = hidden + deep[number]
    return pair.torch.lm_head(language.norm(hidden))[0, -1]


CHOICES = (
    ("divprune", {}, 0),
    # Drops before the last layer that adds DeepStack features, and after this layer.
    ("fastv", {"layer": 1}, 1),
    pytest.param("fastv", {"layer": 2}, 2, marks=pytest.mark.slow),
)


@pytest.mark.parametrize(("name", "options", "before"), CHOICES)
def test_only_kept_tokens_add_their_deepstack_features(pair, processed, name, options, before):
    traces = []
    ask(pair.model, QUESTIONS[-1:], build_pruner(name, 9, options=options), trace=traces.append)
    arrays = trace_arrays(traces[0])
    kept = arrays[f"kept_{int(before > 0)}"]
    assert len(kept) == 9
    assert_close(arrays["logits"], pruned_logits_of_reference(pair, processed, kept, before))


def test_joined_and_unrolled_weights_give_the_same_logits(pair, processed, tower):
    """GPUs run joined matrices and unrolled layers."""
    params, config = pair.model.params, pair.model.config
    tokens, grid = tower[0][:1, None], jnp.asarray(processed.ours.grid[:1])[:, None]
    index = jnp.arange(tokens.shape[2], dtype=jnp.int32)[None, None]
    visual = kept_at(tokens, index < TOKENS[0], index), grid
    joined = join_kernels(jax.tree.map(jnp.copy, params))
    ids, length = jnp.array([[1, IMAGE_TOKEN, 5]]), jnp.array([3])

    @jax.jit
    def logits(params):
        sequence = assemble(params, pair.model.backbone, ids, length, *visual)
        return vlm.prefill(params, config, sequence, 1).logits

    assert_close(logits(unstack(joined)), logits(params))
    abstract = vlm.abstract_params(pair.model.backbone)
    jax.tree.map(np.testing.assert_array_equal, separate_kernels(joined, abstract), params)


@pytest.mark.slow
def test_published_widths_equal_the_reference(tmp_path):
    """Compares one block of the tower and one layer of the 2B model.

    The position table and the rotary sections have their published sizes.
    """
    tower = {"depth": 1, "deepstack_visual_indexes": [0], "hidden_size": 1024, "num_heads": 16}
    tower |= {"intermediate_size": 4096, "out_hidden_size": 2048, "patch_size": 16}
    raw = tiny_qwen3_config(qwen_tokenizer())
    text = raw["text_config"] | {"hidden_size": 2048, "intermediate_size": 6144, "head_dim": 128}
    text |= {"num_attention_heads": 16, "num_key_value_heads": 8, "num_hidden_layers": 1}
    text |= {"rope_theta": 5e6, "rope_scaling": {"rope_type": "default"}}
    folder = tiny_qwen3(
        tmp_path,
        vision_config=tower,
        text_config=text | {"tie_word_embeddings": True},
        tie_word_embeddings=True,
        min_pixels=64 * 32 * 32,
        max_pixels=80 * 32 * 32,
    )
    pair = make_pair(MODEL, folder)
    assert pair.model.config.vision.side == 48
    assert pair.model.config.text.rope_sections == (24, 20, 20)
    picture, traces = noise(0, (300, 260)), []
    generate(pair.model, ["red"], [picture], options=RunOptions(1), trace=traces.append)
    theirs = Qwen2VLImageProcessorPil.from_pretrained(pair.folder)([picture], return_tensors="pt")
    count = int(theirs["image_grid_thw"].prod()) // 4
    text = "<|im_start|>user\n<|vision_start|>" + "<|image_pad|>" * count
    text += "<|vision_end|>red<|im_end|>\n<|im_start|>assistant\n"
    inputs = qwen_inputs(pair, pair.model.tokenizer(text).input_ids, theirs, (0,))
    assert_close(trace_arrays(traces[0])["logits"], pair.torch(**inputs).logits[0, -1])


# Pruners that need no published weights, and pruners that need a class token.
NEED_CLASS_TOKEN = ("cls", "prumerge", "prumerge_plus")
KEEP_IMAGES = [name for name, kind in PRUNERS.items() if kind.keeps_images]
NAMES = [x for x in PRUNERS if x not in {*NEED_CLASS_TOKEN, *KEEP_IMAGES, *weighted()}]
BEFORE = [name for name in NAMES if not issubclass(PRUNERS[name], LayerPruner) and name != "blind"]


SMALL = {"feature_width": E, "text_width": E, "width": 16, "num_heads": 2, "mlp_ratio": 2}
CONFIGS = {
    "stepprune": PolicyConfig(**SMALL, encoder_layers=1, decoder_layers=1),
    "autoselect": AutoSelectConfig(**SMALL, encoder_layers=1),
    "visionselector": VisionSelectorConfig(E, hidden_dim=8),
    "glimpseprune": glimpse(feature_width=E),
}


def random_policy(name="stepprune"):
    """Returns a trained method with random weights; None for a method without weights."""
    if name not in CONFIGS:
        return None
    untrained = PRUNERS[name](config=CONFIGS[name])
    return untrained.replace(params=random_params(untrained.specs(), 1))


@pytest.mark.parametrize("name", [*BEFORE, "stepprune"])
def test_pruners_gather_and_average_deepstack_features_with_their_tokens(name):
    """DeepStack features that are -2 times their token keep this ratio."""
    random = np.random.default_rng(0)
    tokens = random.standard_normal((2, 12, E)).astype(np.float32)
    score = random.random((2, 12)).astype(np.float32)
    taps = {"visionzip": (score, tokens[..., :4]), "holov": (score,), "hiprune": (score, score)}
    taps["mmtok"] = (tokens,)
    fields = {"grid": np.array([[3, 4], [3, 3]], np.int32), "deep": -2 * tokens}
    fields |= {"valid": np.arange(12) < np.array([[12], [9]])}
    fields |= {"text": np.ones((2, 1, E), np.float32), "text_valid": np.ones((2, 1), bool)}
    budget, count, capacity = (None, [12, 9], 12) if name == "all" else (4, 4, 5)
    pruner_inputs = view(tokens, *taps.get(name, ()), count=count, **fields)
    pruner = build_pruner(name, budget, policy=random_policy(name))
    kept = select(pruner.program(), pruner_inputs, capacity)
    assert kept.tokens.shape[2] == 2 * E and kept.count.tolist() == pruner_inputs.count.tolist()
    np.testing.assert_allclose(kept.tokens[..., E:], -2 * kept.tokens[..., :E], atol=1e-5)
    assert np.abs(kept.tokens[:, 0]).max(1).all()


def test_recycled_tokens_average_their_deepstack_features():
    random = np.random.default_rng(0)
    hidden = random.standard_normal((1, 14, 4)).astype(np.float32)
    image = np.where(np.arange(14) < 12, 0, -1)[None]
    sequence = rows(image, hidden)._replace(note=jnp.zeros((1, 14)))
    sequence = sequence._replace(deep=-2 * sequence.hidden[:, :, None])
    score = jnp.asarray(random.random((1, 14)), jnp.float32)
    recycled, is_kept = jax.jit(recycle, static_argnums=3)(sequence, score, jnp.array([[4]]), 0.0)
    assert is_kept.sum() == 4 + 1 + 2  # 8 dropped tokens give 3 candidates and one cluster
    assert recycled.index[0, 4] == -1 and recycled.image[0, 4] == 0
    np.testing.assert_allclose(recycled.deep[:, :, 0], -2 * recycled.hidden, atol=1e-5)


OPTIONS = {name: {"layer": 1} for name in ("fastv", "topv", "dart")}
OPTIONS |= {
    name: {"average": False} for name in ("clse", "pyramiddrop", "sparsevlm", "sparsevlm_v2")
}


@pytest.mark.parametrize("name", quick_or_slow([*NAMES, *CONFIGS], ["visionzip"]))
def test_pruners_keep_their_budget(pair, name):
    budget = None if name in ("all", "blind") else 5
    pruner = build_pruner(name, budget, policy=random_policy(name), options=OPTIONS.get(name))
    questions = QUESTIONS[4], QUESTIONS[6]
    for (_, numbers), answer in zip(questions, ask(pair.model, questions, pruner), strict=True):
        num_tokens = sum(TOKENS[number] for number in numbers)
        assert answer.visual_tokens == num_tokens
        # DART divides the budget among eight pivots.
        expected_counts = {"all": num_tokens, "blind": 0, "dart": 4 * len(numbers)}
        assert answer.kept == expected_counts.get(name, 5 * len(numbers))


@pytest.mark.parametrize("name", NEED_CLASS_TOKEN)
def test_pruners_that_need_a_class_token_are_refused(pair, name):
    config = pair.model.config
    with pytest.raises(ValueError, match=f"^{name}: "):
        build_pruner(name, 5).check(config, config.max_image_tokens)


def gate(alpha, features, stats):
    policy = random_policy()
    inputs = Inputs(jnp.ones((2, 3, E)), deep=features, deep_stats=stats)
    return gate_tokens(policy.params, policy.config, jax.random.key(0), inputs, alpha)


def test_the_noise_gate_hides_the_deepstack_features_of_dropped_tokens():
    random = np.random.default_rng(0)
    features = jnp.asarray(50 + 3 * random.standard_normal((2, 3, 400)), jnp.float32)
    stats = FeatureStats(jnp.full(400, 50.0), jnp.full(400, 9.0), jnp.float32(1))
    alpha = jnp.array([[1.0, 0, 1], [0, 0, 1]])
    run = jax.jit(gate)
    gated_tokens = run(alpha, features, stats)
    assert gated_tokens.shape == (2, 3, E + 400)
    gated_features, is_open = np.asarray(gated_tokens[..., E:]), np.asarray(alpha) > 0
    np.testing.assert_allclose(gated_features[is_open], np.asarray(features)[is_open], rtol=1e-5)
    changed_features = jnp.where(alpha[..., None] > 0, features, features + 7)
    np.testing.assert_array_equal(run(alpha, changed_features, stats), gated_tokens)
    # The noise has the mean and the standard deviation of the features.
    noise_values = gated_features[~is_open]
    assert abs(noise_values.mean() - 50) < 0.3 and abs(noise_values.std() - 3) < 0.2
    gradient = jax.jit(jax.grad(lambda x: run(alpha, x, stats).sum()))(features)
    np.testing.assert_array_equal(np.abs(gradient).max(2) > 0, is_open)


def test_visionselector_scales_deepstack_features_like_their_tokens():
    tokens = jnp.asarray(np.random.default_rng(0).standard_normal((2, 6, E)), jnp.float32)
    inputs, policy = Inputs(tokens, deep=-2 * tokens), random_policy("visionselector")
    gated_inputs = []

    @jax.jit
    def run(inputs):
        policy.loss(
            jax.random.key(0), inputs, lambda x: gated_inputs.append(x) or x.sum(), Progress()
        )
        return gated_inputs.pop()

    gated_tokens = run(inputs)
    np.testing.assert_allclose(gated_tokens[..., E:], -2 * gated_tokens[..., :E], rtol=1e-5)
    assert (np.abs(gated_tokens) < np.abs(inputs.with_deepstack)).all()


def test_vision_flops_equal_the_traced_program(pair):
    backbone, params = pair.model.backbone, vlm.abstract_params(pair.model.backbone, jnp.float32)
    pixels = pair.model.backbone.preprocess(pair.model.image_settings, [noise(0, (32, 32))])
    jaxpr = jax.make_jaxpr(lambda p, x: backbone.encode_image(p, x)[0])(params, pixels)
    assert pixels.grid.tolist() == [[4, 4]] and pixels.values.shape[1] == 64  # no padding
    assert traced_flops(jaxpr) == sum(backbone.vision_flops((4, 4)).values())


# Files.


@pytest.mark.parametrize("tied", [False, True])
def test_folders_are_loaded_and_saved(tmp_path, tied):
    config = tiny_qwen3_config(qwen_tokenizer())
    changes = {"tie_word_embeddings": tied}
    changes["text_config"] = config["text_config"] | {"tie_word_embeddings": tied}
    folder = tiny_qwen3(tmp_path / "from", **changes)
    model = load_vlm(folder, dtype=jnp.float32, max_pixels=1024, progress=False)
    assert ("head" in model.params["language"]) != tied
    assert model.config.max_pixels == 1024 and model.config.min_pixels == 256
    reloaded = save_and_reload(model, tmp_path / "to")
    jax.tree.map(np.testing.assert_array_equal, reloaded.params, model.params)
    theirs, report = MODEL.from_pretrained(tmp_path / "to", output_loading_info=True)
    problems = ("missing_keys", "unexpected_keys", "mismatched_keys")
    assert not any(report[problem] for problem in problems)
    expected_kernel = theirs.model.visual.deepstack_merger_list[1].linear_fc2.weight.detach()
    np.testing.assert_array_equal(
        model.params["deepstack_mergers"]["down"]["kernel"][1].T, expected_kernel
    )
    # Newer versions of `transformers` write other fields for the rotary embedding.
    theirs.config.save_pretrained(tmp_path / "new")
    raw = json.loads((tmp_path / "new" / "config.json").read_text())
    assert "rope_parameters" in raw["text_config"]
    newer_config = Qwen3_VL.read(raw, None).config
    assert newer_config.text == model.config.text and newer_config.vision == model.config.vision


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
def test_an_unsupported_field_is_refused_by_name(changes, message):
    raw = tiny_qwen3_config(qwen_tokenizer())
    for name, value in changes.items():
        section = f"{name}_config"
        raw |= {section: raw[section] | value} if name in ("text", "vision") else {name: value}
    with pytest.raises(ValueError, match=message) as error:
        find_family(raw, "here").read(raw, None)
    assert "\n" not in str(error.value)


def test_the_error_for_another_family_lists_the_supported_models():
    raw = {"model_type": "qwen3_5", "architectures": ["Qwen3_5ForConditionalGeneration"]}
    with pytest.raises(ValueError, match=r"supported: .*Qwen3-VL without experts") as error:
        find_family(raw, "here")
    assert "docs/architecture.md" in str(error.value) and "\n" not in str(error.value)


def test_norms_are_not_quantized(pair):
    int8_model = load_vlm(pair.folder, dtype=jnp.float32, weights="int8", progress=False)
    int8_layers, full_layers = (
        model.params["language"]["layers"] for model in (int8_model, pair.model)
    )
    for name in ("query_norm", "key_norm"):
        scale = int8_layers["attention"][name]["scale"]
        np.testing.assert_array_equal(scale, full_layers["attention"][name]["scale"])
    assert int8_layers["attention"]["query"]["kernel"].value.dtype == jnp.int8


def test_prompts_equal_the_chat_template():
    start = (
        "<|im_start|>user\n<|vision_start|><image><|vision_end|>What?<|im_end|>\n"
        "<|im_start|>assistant\n"
    )
    turns = [Qwen3_VL.place_images("What?", 1), "A dog.", "Why?"]
    answered = start + "A dog.<|im_end|>"
    assert Qwen3_VL.conversation(turns[:1]) == start
    assert Qwen3_VL.conversation(turns[:2]) == answered
    second_question = "\n<|im_start|>user\nWhy?<|im_end|>\n<|im_start|>assistant\n"
    assert Qwen3_VL.conversation(turns) == answered + second_question
    with_system = "<|im_start|>system\nBe brief.<|im_end|>\n" + start
    assert Qwen3_VL.conversation(turns[:1], "Be brief.") == with_system
    with pytest.raises(ValueError, match=r"<\|video_pad\|>, which the template adds"):
        Qwen3_VL.conversation(["<|video_pad|>What?"])
