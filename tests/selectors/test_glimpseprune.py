"""GlimpsePrune beside a plain reference in float64: a token more in each row, loops, no masks."""

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from plain_decoder import loop_assemble, plain_layer
from small_world import glimpse, tiny_model
from views import llava
from visual import noise

from stepprune_jax.inference import RunOptions, Sampling, generate, pipeline, read_request
from stepprune_jax.pruning import Budget, Survivors
from stepprune_jax.registry import build_pruner
from stepprune_jax.selectors import GlimpsePrune
from stepprune_jax.selectors.glimpseprune import attention_map

LAYERS = {"le_layers": (0, 2), "selected_visual_layers": (3, 1)}
CONFIG = glimpse(**LAYERS, attn_fuse_size=8, attn_fuse_num_heads=2)
SIDE = 4  # of each image


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """A LLaVA of 3 layers and 16 visual tokens."""
    sizes = {"text": {"num_hidden_layers": 3}, "vision": {"image_size": 8 * SIDE}}
    return tiny_model(tmp_path_factory.mktemp("model"), **sizes)


def test_attention_is_logits_or_logarithms_of_weights():
    scores = {"scores.0": jnp.log(jnp.array([[[[1.0, 2, 5]], [[3, 3, 2]]]]))}
    config = dataclasses.replace(CONFIG, selected_layers=(0,))
    shares = np.array([[1, 3], [2, 3]]) / 8  # of the visual tokens; the last slot is the token's
    np.testing.assert_allclose(attention_map(config, scores, 2)[0], np.log(shares), rtol=1e-6)
    config = dataclasses.replace(config, use_attention_logits=True)
    np.testing.assert_allclose(attention_map(config, scores, 2)[0], np.log(8 * shares), rtol=1e-6)


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"min_remain_num": 0}, [3, 0]),  # of the second image none exceeds the threshold
        ({"reduce_threshold": 0.7}, [2, 1]),  # their probabilities are .73, .62 and .88
        ({"max_remain_ratio": 0.5}, [2, 1]),  # 2.5 and 1 at most
        ({"max_remain_ratio": 0.1}, [1, 1]),  # none, but one remains
        ({"min_remain_num": 4}, [4, 2]),
    ],
)
def test_a_threshold_decides_between_bounds(options, expected):
    image = jnp.array([[0, 0, 0, 0, 0, -1, 1, 1, -1]])
    logits = jnp.array([[1.0, -1, 0.5, 2, -3, 9, -1, -2, 9]])
    pruner = GlimpsePrune(Budget("adaptive"), config=CONFIG, **options)
    assert pruner._count_above_threshold(logits, image, 2).tolist() == [expected]


def test_a_share_is_rounded_down_as_the_authors_program_does():
    assert 0.29 * 100 < 29  # in float32 it is 29
    pruner = GlimpsePrune(Budget("adaptive"), config=CONFIG, max_remain_ratio=0.29)
    assert pruner.schedule(llava(), 100).after == (Survivors(28),)


def plain(tree):
    return jax.tree.map(lambda x: np.asarray(x, np.float64), tree)


def norm(scale, x, eps=1e-6):
    return np.array([row / math.sqrt((row**2).mean() + eps) for row in x]) * scale


def linear(layer, x):
    return x @ layer["kernel"] + layer.get("bias", 0)


def rotated(x, number):
    """Rotates queries or keys of one head [n, w]: half of the pairs by row, half by column."""
    quarter = x.shape[1] // 4
    speeds = 10000.0 ** (-np.arange(quarter) / quarter)
    row, column = divmod(number, SIDE)
    turn = np.exp(1j * np.concatenate([row[:, None] * speeds, column[:, None] * speeds], axis=1))
    pairs = (x[:, : 2 * quarter] + 1j * x[:, 2 * quarter :]) * turn
    return np.concatenate([pairs.real, pairs.imag], axis=1)


def predicted_logits(weights, attention, states):
    """Returns logits [n], given attention [n, a] and the states [n, c] that each block reads."""
    weights, number = plain(weights), np.arange(len(attention))
    x = linear(weights["attention_in"], attention)
    for i, state in enumerate(states):
        block = weights[f"block_{i}"]
        normed = norm(block["norm1"], x)
        conditioned = np.concatenate([normed, state], axis=1)
        heads = []
        for parts in zip(
            np.split(linear(block["query"], conditioned), 2, axis=1),
            np.split(linear(block["key"], conditioned), 2, axis=1),
            np.split(linear(block["value"], normed), 2, axis=1),
            strict=True,
        ):
            query, key = (rotated(part, number) for part in parts[:2])
            weights_of_head = np.exp(query @ key.T / math.sqrt(query.shape[1]))
            heads.append(weights_of_head / weights_of_head.sum(1, keepdims=True) @ parts[2])
        x = x + linear(block["out"], np.concatenate(heads, axis=1))
        normed = norm(block["norm2"], x)
        gate = linear(block["gate"], normed)
        x = x + linear(block["down"], gate / (1 + np.exp(-gate)) * linear(block["up"], normed))
    return linear(weights["out"], x)[:, 0]


def random_policy(seed=3):
    """Returns a policy whose biases and norms are random as well."""
    policy = GlimpsePrune.init(jax.random.key(seed), CONFIG, None)
    leaves, tree = jax.tree.flatten(policy.params)
    keys = jax.random.split(jax.random.key(seed + 1), len(leaves))
    perturbed = [
        leaf + 0.3 * jax.random.normal(k, leaf.shape) for leaf, k in zip(leaves, keys, strict=True)
    ]
    return policy.replace(params=tree.unflatten(perturbed))


PROMPTS = ["is the red dog in a chat or no", "What?", "two"]
IMAGES = [[noise(0, (32, 32))], [noise(1, (32, 32)), noise(2, (32, 32))], []]


def reference(model, policy, request, row):
    """Returns logits [images, n] of a prompt's images, computed without a cache."""
    taps = policy.taps(model.config)
    images = pipeline.encode(model, request.images, taps)
    tokens = np.asarray(model.backbone.project(model.params, images.features))
    table = np.asarray(model.params["language"]["embed"]["embedding"])
    image_numbers, n = request.image_of[row], tokens.shape[1]
    all_tokens = [range(n)] * len(image_numbers)
    layout, following = loop_assemble(request.ids[row], all_tokens, n, "original")
    hidden = [
        table[w] if image < 0 else tokens[image_numbers[image], i] for w, image, i, _ in layout
    ]
    hidden = np.float64([*hidden, np.zeros(48)])
    position = np.array([*(place for *_, place in layout), following])
    glimpse, scores = plain(policy.params["glimpse"]), []
    projected = linear(glimpse, glimpse["embeddings"][:, 0])
    vectors = norm(glimpse["scale"], projected, CONFIG.rms_norm_eps)
    vector_of = dict(zip(CONFIG.le_layers, vectors, strict=True))
    language, text = model.params["language"], model.config.text
    for layer in range(CONFIG.reduce_layer + 1):
        hidden[-1] += vector_of.get(layer, 0)
        arguments = (language, text, layer, hidden, position, np.ones(len(hidden), bool))
        hidden, logits = plain_layer(*arguments)
        last_logits = logits[:, -1]
        scores.append(last_logits - np.log(np.exp(last_logits).sum(1, keepdims=True)))
    attention = np.concatenate(scores).T
    image_logits = []
    for image, number in enumerate(image_numbers):
        states = [
            linear(plain(policy.params[f"state_{i}"]), np.float64(images.taps[tap][number, 1:]))
            for i, tap in enumerate(taps)
        ]
        slots = [slot for slot, token in enumerate(layout) if token[1] == image]
        image_logits.append(predicted_logits(policy.params, attention[slots], states))
    return np.array(image_logits)


def answered(model, policy, budget=None, **options):
    method, prefills = build_pruner("glimpseprune", budget, policy=policy, options=options), []
    answers = generate(
        *(model, PROMPTS, IMAGES, method),
        sampling=Sampling(stop_ids=()),
        options=RunOptions(3),
        trace=lambda batch: prefills.append(jax.tree.map(jnp.copy, batch)),
    )
    return answers, prefills[0]


def test_tokens_above_the_threshold_or_the_best_ones_remain(model):
    policy = random_policy()
    request = read_request(model, PROMPTS, IMAGES)
    logits = [reference(model, policy, request, row) for row in (0, 1)]
    # A threshold between two logits makes the images keep different numbers of tokens.
    ordered = np.sort(np.concatenate(logits).ravel())
    middle = (ordered[29] + ordered[30]) / 2
    assert ordered[30] - ordered[29] > 1e-3
    threshold = 1 / (1 + math.exp(-middle))
    for options, budget in [({"reduce_threshold": threshold}, None), ({}, 5)]:
        answers, prefill = answered(model, policy, budget, **options)
        remaining = []
        for row in (0, 1):
            kept = [np.flatnonzero(x > (np.sort(x)[-6] if budget else middle)) for x in logits[row]]
            assert [list(x) for x in answers[row].kept_indices] == [x.tolist() for x in kept]
            remaining.append(sum(map(len, kept)))
        remaining.append(0)
        assert budget or len({len(x) for answer in answers for x in answer.kept_indices}) > 1
        assert [answer.kept for answer in answers] == prefill.kept.tolist() == remaining
        # The caches of the first layers drop tokens as well.
        text = [len(ids) - len(images) for ids, images in zip(request.ids, IMAGES, strict=True)]
        for cache in prefill.state.cache:
            assert cache.length.tolist() == np.add(text, remaining).tolist()
            assert cache.key.shape[3] < prefill.trace.stages[0].index.shape[1]


def test_pruning_in_front_of_a_model_is_refused(model):
    policy = random_policy()
    with pytest.raises(ValueError, match="glimpseprune prunes inside a language model"):
        policy.prune(np.zeros((1, 4, 32), np.float32), budget=2)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"min_remain_num": 10}, "min_remain_num is 10, expected 0 to 9"),
        ({"max_remain_ratio": 0.0}, r"max_remain_ratio is 0.0, expected a share in \(0, 1\]"),
        ({"config": dataclasses.replace(CONFIG, num_attention_heads=2)}, "num_attention_heads"),
        ({"config": dataclasses.replace(CONFIG, vision_width=8)}, "vision_width of its weights is"),
        ({"config": dataclasses.replace(CONFIG, reduce_layer=2)}, "reduce_layer of its weights is"),
        ({"config": dataclasses.replace(CONFIG, selected_visual_layers=(1, 9))}, "visual_layers"),
    ],
)
def test_weights_and_options_that_do_not_fit_are_refused(options, message):
    method = GlimpsePrune(**{"config": CONFIG} | options)
    pruner = method.replace(params=method.init_params(jax.random.key(0)))
    with pytest.raises(ValueError, match=message):
        pruner.check(llava(3), 9)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("le_layers", (1, 2)),
        ("selected_layers", ()),
        ("reduce_layer", 0),
        ("attn_fuse_num_heads", 3),
        ("reduce_threshold", math.nan),
    ],
)
def test_fields_of_the_configuration_are_checked(field, value):
    with pytest.raises(ValueError, match=f"GlimpsePruneConfig.{field} is"):
        dataclasses.replace(CONFIG, **{field: value})
