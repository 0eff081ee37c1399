import jax.numpy as jnp
import numpy as np
import pytest
import torch
import torch_pruning
import torch_stages
from generation_reference import ask, traced
from views import select, view

from stepprune_jax.pruning import Budget, HoloV, Method


def selected(tokens, attention, count, crops, capacity=None):
    """What is kept of rows of tokens [r, n, e] by attention [r, n], with a padded capacity."""
    tokens, attention = (jnp.asarray(x, jnp.float32) for x in (tokens, attention))
    heads = jnp.pad(jnp.stack([1.5 * attention, 0.5 * attention], 1), ((0, 0), (0, 0), (1, 0)))
    pruner = HoloV(Budget("count", count), crops).program()
    capacity = min(attention.shape[1], count + 2) if capacity is None else capacity
    return select(pruner, view(tokens, heads, count=count), capacity)


TOKENS = [[1, 0], [1, 0.2], [0, 1], [0.5, 0.5], [1, 1], [-1, 0], [0, -1], [1, -1]]
ATTENTION = [0.10, 0.02, 0.05, 0.03, 0.04, 0.20, 0.01, 0.06]


def test_an_image_worked_by_hand():
    # Means of likeness in crop 0: .562561 .669581 .301074 .748753, variances .276194 .265208
    # .119056 .190346, factor 235.07, scores 105.8 25.6 52.5 34.0 with mean 54.5; in crop 1 the
    # mean is 84.475. Shares .392 and .608 of three: one each, and one more for crop 1.
    kept = selected([TOKENS], [ATTENTION], 3, 2)
    assert kept.index[0].tolist() == [0, 5, 7, -1, -1] and kept.count.tolist() == [3]
    np.testing.assert_array_equal(kept.tokens[0, :3], np.array(TOKENS)[[0, 5, 7]])
    # A larger share is in the order of attention: 2.35 and 3.65 of six, and one more for crop 1,
    # which has no more than four, and so keeps all of them as they stand.
    assert selected([TOKENS], [ATTENTION], 6, 2).index[0].tolist() == [0, 2, 4, 5, 6, 7, -1, -1]
    # One crop is plain attention.
    assert selected([TOKENS], [ATTENTION], 4, 1, 4).index[0].tolist() == [5, 0, 7, 2]


def test_zero_vectors_stand_for_what_a_crop_does_not_have():
    # Crop 0 gets next to all of the attention, and has two tokens.
    tokens, attention = np.ones((1, 4, 3)), [[0.5, 0.5, 0.001, 0.002]]
    kept = selected(tokens, attention, 3, 2, 4)
    assert kept.index[0].tolist() == [0, 1, -1, -1]
    assert kept.valid[0].tolist() == [True, True, True, False] and kept.count.tolist() == [3]
    assert kept.place[0].tolist() == [0, 1, 3, 0]
    assert not np.asarray(kept.tokens)[0, 2:].any()


def plain(tokens, attention, crops, count, alpha=0.09):
    """One image in float64 loops: indices crop by crop, without zero vectors."""
    parts = [part for part in np.array_split(np.arange(len(tokens)), crops) if len(part)]
    scores = []
    for part in parts:
        if len(part) == 1:
            scores.append(attention[part[0]])
            continue
        unit = [tokens[i] / (np.sqrt((tokens[i] ** 2).sum()) + 1e-6) for i in part]
        variance = []
        for i, own in enumerate(unit):
            likeness = [0 if i == j else own @ other for j, other in enumerate(unit)]
            mean = sum(likeness) / (len(part) - 1)
            variance.append(sum((x - mean) ** 2 for x in likeness) / (len(part) - 1))
        scaled = [1000 * attention[i] for i in part]
        factor = np.mean(scaled) / (np.mean(variance) + 1e-6)
        scores.append(
            np.mean([a + alpha * factor * v for a, v in zip(scaled, variance, strict=True)])
        )
    weights = np.array(scores) / (sum(scores) + 1e-6)
    share = np.floor(weights * count).astype(int)
    for crop in torch_stages.best(weights, count - share.sum()):
        share[crop] += 1
    kept = []
    for part, number in zip(parts, share, strict=True):
        best = part[torch_stages.best(attention[part], number)]
        kept += (part if number >= len(part) else best).tolist()
    return kept


def test_many_images_equal_a_plain_loop():
    random = np.random.default_rng(0)
    zeros = 0
    for n, crops, count in ((16, 3, 5), (16, 3, 15), (16, 16, 6), (9, 16, 4), (40, 7, 12)):
        tokens = random.standard_normal((20, n, 6)) + random.standard_normal((20, 1, 6))
        attention = random.random((20, n)) ** 3
        kept = selected(tokens, attention, count, crops)
        for row in range(20):
            expected = plain(tokens[row], attention[row], crops, count)
            zeros += count - len(expected)
            expected += [-1] * (kept.index.shape[1] - len(expected))
            assert kept.index[row].tolist() == expected
    assert zeros > 0


@pytest.mark.parametrize(("count", "crops"), [pytest.param(5, 16, marks=pytest.mark.slow), (7, 2)])
def test_generation_equals_the_torch_reference(llava_pair, count, crops):
    pruner = HoloV(Budget("count", count), crops)

    def choose(tokens, tower, pixels):
        _, attention, _ = torch_pruning.tower_signals(tower, pixels)
        kept = plain(tokens.numpy(), attention.mean(0)[1:], crops, count)
        missing = count - len(kept)
        return kept + [-1] * missing, torch.cat(
            [tokens[kept], torch.zeros(missing, tokens.shape[1])]
        )

    for asked in traced(llava_pair, ask(3, seed=count), Method(pruner), 1):
        torch_pruning.check(llava_pair, asked, choose, projected=True)
