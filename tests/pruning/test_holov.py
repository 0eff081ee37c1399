import jax
import jax.numpy as jnp
import numpy as np
import torch
import torch_pruning
import torch_stages
from generation_reference import ask, traced
from views import select, view

from stepprune_jax.policy import layers
from stepprune_jax.pruning import Budget, HoloV


def plain(tokens, attention, crops, count, hands_on=False):
    """One image in float64 loops: indices crop by crop, without zero vectors.

    `hands_on`: whether the surplus of full crops goes to others, as without a class token.
    """
    parts = [part for part in np.array_split(np.arange(len(tokens)), crops) if len(part)]
    scores = []
    for part in parts:
        if len(part) == 1:
            scores.append(attention[part[0]])
            continue
        unit = [tokens[i] / (np.sqrt((tokens[i] ** 2).sum()) + 1e-6) for i in part]
        variance = []
        for i, own in enumerate(unit):
            likeness = [0 if i == j else own @ baseline for j, baseline in enumerate(unit)]
            mean = sum(likeness) / (len(part) - 1)
            variance.append(sum((x - mean) ** 2 for x in likeness) / (len(part) - 1))
        scaled = [1000 * attention[i] for i in part]
        factor = np.mean(scaled) / (np.mean(variance) + 1e-6)
        scores.append(
            np.mean([a + 0.09 * factor * v for a, v in zip(scaled, variance, strict=True)])
        )
    weights = np.array(scores) / (sum(scores) + 1e-6)
    share = np.floor(weights * count).astype(int)
    for crop in torch_stages.best(weights, count - share.sum()):
        share[crop] += 1
    share = np.minimum(share, [len(part) for part in parts])
    for crop in torch_stages.best(weights, len(parts) if hands_on else 0):
        share[crop] += min(count - share.sum(), len(parts[crop]) - share[crop])
    kept = []
    for part, number in zip(parts, share, strict=True):
        best = part[torch_stages.best(attention[part], number)]
        kept += (part if number >= len(part) else best).tolist()
    return kept


def test_many_images_equal_a_plain_loop():
    """Zero vectors stand for what a crop does not have."""
    random = np.random.default_rng(0)
    zeros = 0
    for n, crops, count in ((16, 3, 5), (16, 3, 15), (16, 16, 6), (9, 16, 4), (40, 7, 12)):
        tokens = random.standard_normal((20, n, 6)) + random.standard_normal((20, 1, 6))
        attention = random.random((20, n)) ** 3
        heads = np.pad(np.stack([1.5 * attention, 0.5 * attention], 1), ((0, 0), (0, 0), (1, 0)))
        inputs = view(jnp.float32(tokens), jnp.float32(heads), count=count)
        kept = select(HoloV(Budget("count", count), crops).program(), inputs, count + 1)
        np.testing.assert_array_equal(kept.valid, [[True] * count + [False]] * 20)
        for row in range(20):
            expected = plain(tokens[row], attention[row], crops, count)
            missing = count - len(expected)
            zeros += missing
            assert kept.index[row].tolist() == expected + [-1] * (missing + 1)
            assert kept.place[row].tolist() == expected + [n - 1] * missing + [0]
            own = np.float32(tokens[row, expected])
            np.testing.assert_array_equal(kept.tokens[row, : len(expected)], own)
            assert not np.asarray(kept.tokens)[row, len(expected) :].any()
    assert zeros > 0


def test_without_a_class_token_crops_share_the_budget_of_images_of_any_size(monkeypatch):
    random, sizes, counts = np.random.default_rng(0), (23, 40, 12), (8, 13, 1)
    tokens = random.standard_normal((3, 40, 6), np.float32)
    received = random.random((3, 40), np.float32)
    received[1, :3] = 50  # so that the first crop gets more than it has
    valid = np.arange(40) < np.array(sizes)[:, None]
    inputs = view(tokens, received, count=counts, valid=valid)
    kept = select(HoloV(), inputs, 16)
    assert kept.count.tolist() == list(counts)
    for row, (size, count) in enumerate(zip(sizes, counts, strict=True)):
        crops = max(1, 16 * size // (9 * count))
        expected = plain(tokens[row, :size], received[row, :size], crops, count, hands_on=True)
        assert kept.index[row].tolist() == sorted(expected) + [-1] * (16 - count)
    # Many tokens are compared some at a time: six parts, with two tokens of padding.
    monkeypatch.setattr(layers, "MANY_QUERIES", 8)
    monkeypatch.setattr(layers, "QUERIES", {"default": 7})
    in_parts = jax.jit(lambda inputs: HoloV().keep(inputs, 16))(inputs)
    np.testing.assert_array_equal(in_parts.index, kept.index)


def test_generation_equals_the_torch_reference(llava_pair):
    count, crops = 7, 2

    def choose(tokens, tower, pixels):
        _, attention, _ = torch_pruning.tower_signals(tower, pixels)
        kept = plain(tokens.numpy(), attention.mean(0)[1:], crops, count)
        missing = count - len(kept)
        return kept + [-1] * missing, torch.cat(
            [tokens[kept], torch.zeros(missing, tokens.shape[1])]
        )

    method = HoloV(Budget("count", count), crops)
    for example in traced(llava_pair, ask(3, seed=count), method, 1):
        torch_pruning.check(llava_pair, example, choose, projected=True)
