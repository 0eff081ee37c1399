"""Pruners in a model without a class token, whose images differ in size and positions have axes."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from quick import quick_or_slow
from small_world import glimpse
from views import select, view
from visual import noise

from stepprune_jax.inference import RunOptions, generate, trace_arrays
from stepprune_jax.policy import FeatureStats, layers
from stepprune_jax.pruning import (
    PRUNERS,
    Budget,
    Policy,
    VisionSelectorConfig,
    learned_methods,
    make_method,
)
from stepprune_jax.pruning.holov import HoloV, keep_in_crops
from stepprune_jax.pruning.visionzip import VisionZip, merge

SIZES = (23, 40, 12)
SHARE = "1/3"
NEED_CLASS_TOKEN = ("cls", "prumerge", "prumerge_plus")
# One before the language model and one between its layers.
QUICK = ("dart", "visionzip")
LAYERS = {"fastv": {"layer": 1}, "topv": {"layer": 1}, "dart": {"layer": 1}}
FREE = {"average": False}
OPTIONS = LAYERS | {name: FREE for name in ("pyramiddrop", "sparsevlm", "sparsevlm_v2")}


def rows(seed=0):
    """Tokens, received attention and keys of images of `SIZES`, with junk behind them."""
    random = np.random.default_rng(seed)
    r, n = len(SIZES), max(SIZES)
    tokens = random.standard_normal((r, n, 6), np.float32)
    received = random.random((r, n), np.float32)
    keys = random.standard_normal((r, n, 4), np.float32)
    return tokens, received, keys, np.arange(n) < np.array(SIZES)[:, None]


keep_all_crops = jax.jit(keep_in_crops, static_argnums=4)


def crops_by_hand(tokens, received, count, alpha):
    """HoloV of one image, crop by crop."""
    n = len(tokens)
    crops = min(n, max(1, 16 * n // (9 * count)))
    parts, scores = np.array_split(np.arange(n), crops), []
    for part in parts:
        if len(part) == 1:
            scores.append(received[part[0]])
            continue
        unit = tokens[part] / (np.linalg.norm(tokens[part], axis=1, keepdims=True) + 1e-6)
        likeness = unit @ unit.T
        np.fill_diagonal(likeness, 0)
        mean = likeness.sum(1, keepdims=True) / (len(part) - 1)
        variance = ((likeness - mean) ** 2).sum(1) / (len(part) - 1)
        seen = 1000 * received[part]
        factor = seen.mean() / (variance.mean() + 1e-6)
        scores.append((seen + alpha * factor * variance).mean())
    weight = np.array(scores) / (np.sum(scores) + 1e-6)
    share = np.floor(weight * count).astype(int)
    best = np.argsort(-weight, kind="stable")
    share[best[: count - share.sum()]] += 1
    share = np.minimum(share, list(map(len, parts)))
    for crop in best:
        share[crop] += min(count - share.sum(), len(parts[crop]) - share[crop])
    chosen = [
        part[np.argsort(-received[part], kind="stable")][:kept]
        for part, kept in zip(parts, share, strict=True)
    ]
    return sorted(np.concatenate(chosen).tolist())


@pytest.mark.parametrize("counts", [(8, 13, 4), (1, 4, 12), (20, 40, 1)])
def test_crops_share_the_budget_of_images_of_any_size(counts):
    tokens, received, _, valid = rows()
    received[1, :3] = 50  # so that the first crop gets more than it has
    kept = keep_all_crops(tokens, received, valid, jnp.array(counts), 0.09)
    for row, (size, count) in enumerate(zip(SIZES, counts, strict=True)):
        expected = crops_by_hand(tokens[row, :size], received[row, :size], count, 0.09)
        assert np.flatnonzero(kept[row]).tolist() == expected
    shown = view(tokens, received, count=counts, valid=valid)
    pruned = select(HoloV(Budget("rate", 1)).program(), shown, max(counts))
    assert pruned.count.tolist() == list(counts)
    np.testing.assert_array_equal(pruned.index[0, : counts[0]], np.flatnonzero(kept[0]))


def zip_by_hand(tokens, received, keys, count):
    """VisionZip of one image: token numbers in raster order, -1 for merged ones, and the tokens."""
    n, contextual = len(tokens), max(1, round(5 * count / 32))
    dominant = set(np.argsort(-received, kind="stable")[: count - contextual].tolist())
    rest = [token for token in range(n) if token not in dominant]
    targets = rest[:: max(1, len(rest) // contextual)][:contextual]
    unit = keys / np.linalg.norm(keys, axis=1, keepdims=True)
    assigned = {target: [] for target in targets}
    for token in rest:
        if token not in targets:
            likeness = [unit[token] @ unit[target] for target in targets]
            assigned[targets[int(np.argmax(likeness))]].append(token)
    merged = {
        target: tokens[target] + (tokens[others].mean(0) if others else 0)
        for target, others in assigned.items()
    }
    kept = sorted(dominant | {*targets})
    index = [-1 if token in merged else token for token in kept]
    return kept, index, np.stack([merged.get(token, tokens[token]) for token in kept])


def test_dominant_tokens_are_kept_and_the_others_merged():
    tokens, received, keys, valid = rows(1)
    counts, pruner = (8, 13, 4), VisionZip(Budget("rate", 1))
    kept = select(pruner, view(tokens, received, keys, count=counts, valid=valid), 16)
    assert kept.count.tolist() == list(counts)
    for row, (size, count) in enumerate(zip(SIZES, counts, strict=True)):
        parts = (part[row, :size] for part in (tokens, received, keys))
        place, index, expected = zip_by_hand(*parts, count)
        assert kept.place[row, :count].tolist() == place
        assert kept.index[row, :count].tolist() == index
        np.testing.assert_allclose(kept.tokens[row, :count], expected, atol=1e-5)
        assert not kept.valid[row, count:].any() and (kept.index[row, count:] == -1).all()


def test_ten_tokens_are_merged_as_in_the_authors_program():
    """The expected values are those of the authors' program for Qwen2.5-VL, with these ratios."""
    received = [0.1, 0.9, 0.2, 0.8, 0.3, 0.7, 0.05, 0.15, 0.25, 0.4]
    keys = [[1, 0], [5, 5], [0, 1], [5, 5], [2, 1], [5, 5], [1, 3], [3, -1], [0, 2], [1, 1]]
    tokens = [[i, 10 * i] for i in range(10)]
    arrays = (jnp.array([x], jnp.float32) for x in (received, keys, tokens))
    counts = jnp.array([3]), jnp.array([2])  # dominant, contextual
    dominant, target, merged = merge(*arrays, jnp.ones((1, 10), bool), *counts, 5)
    assert np.flatnonzero(dominant[0]).tolist() == [1, 3, 5]
    assert np.flatnonzero(target[0]).tolist() == [0, 6]
    expected = [[5.5, 55], [1, 10], [3, 30], [5, 50], [37 / 3, 370 / 3]]
    np.testing.assert_allclose(np.asarray(merged[0])[[0, 1, 3, 5, 6]], expected, rtol=1e-6)


def test_many_tokens_are_compared_some_at_a_time(monkeypatch):
    tokens, received, keys, valid = map(jnp.asarray, rows(2))
    counts, merged = jnp.array([8, 13, 4]), jnp.array([2, 3, 1])

    def chosen():
        crops = keep_in_crops(tokens, received, valid, counts, 0.09)
        return crops, *merge(received, keys, tokens, valid, counts, merged, 16)

    at_once = jax.jit(chosen)()
    monkeypatch.setattr(layers, "MANY_QUERIES", 8)
    monkeypatch.setattr(layers, "QUERIES", 7)  # six parts, with two tokens of padding
    in_parts = jax.jit(lambda: chosen())()  # another function, or nothing would be compiled
    for own, expected in zip(in_parts, at_once, strict=True):
        np.testing.assert_allclose(own, expected, atol=1e-6)


def learned(name):
    """A random policy of a method with weights; None for the others."""
    widths = {"feature_width": 48, "text_width": 48, "width": 8, "num_heads": 2, "mlp_ratio": 1}
    if name not in learned_methods():
        return None
    if name == "glimpseprune":
        parts = {"selected_layers": (1,), "selected_visual_layers": (3, 1)}
        config = glimpse(feature_width=48, use_attention_logits=True, **parts)
        return Policy.init(jax.random.key(0), config, None)
    if name == "visionselector":
        return Policy.init(jax.random.key(0), VisionSelectorConfig(48), None)
    # Draws depend on the number of a row.
    config = PRUNERS[name].config_type(**widths, encoder_layers=1, draw=0.0)
    return Policy.init(jax.random.key(0), config, FeatureStats.start(48))


@pytest.mark.parametrize(
    "name", quick_or_slow([name for name in PRUNERS if name not in NEED_CLASS_TOKEN], QUICK)
)
def test_images_of_different_sizes_keep_the_same_share(qwen_model, name):
    """Of 35 and 22 tokens; where a row stands changes nothing."""
    images, seen = [noise(50, (50, 70)), noise(20, (20, 90))], []
    budget = None if name == "all" else SHARE
    method = make_method(name, budget, policy=learned(name), options=OPTIONS.get(name))
    how = {"options": RunOptions(3, warm_up=False), "trace": seen.append}
    prompts = ["Is it red?", "Is it red?"]
    there = generate(qwen_model, prompts, images, method, **how)
    back = generate(qwen_model, prompts, images[::-1], method, **how)
    counts = [35, 22] if name == "all" else [12, 7]
    if name == "dart":  # in turns of eight pivots, four of which are added
        counts = [8 + 4, 0 + 4]
    assert [answer.visual_tokens for answer in there] == [35, 22]
    assert [answer.kept for answer in there] == counts
    arrays = [trace_arrays(seen[0], row) for row in (0, 1)]
    for row in (0, 1) if name != "random" else ():  # which draws by the number of a row
        swapped = trace_arrays(seen[1], 1 - row)
        for key, value in arrays[row].items():
            np.testing.assert_allclose(swapped[key], value, atol=1e-4)
        assert back[1 - row].token_ids == there[row].token_ids
    # Kept tokens have the position ids of the whole image, which is 5 rows and 7 columns.
    last = max(int(key.partition("_")[2]) for key in arrays[0] if key.startswith("kept"))
    kept, slot, position = (arrays[0][f"{what}_{last}"] for what in ("kept", "slot", "position"))
    own = kept >= 0
    start = position[0, slot[0]]
    np.testing.assert_array_equal(position[0, slot], start)
    np.testing.assert_array_equal((position[1, slot] - start)[own], kept[own] // 7)
    np.testing.assert_array_equal((position[2, slot] - start)[own], kept[own] % 7)
    assert position[:, -1].tolist() == [start + 7 + position.shape[1] - 1 - slot[-1] - 1] * 3
