import jax
import numpy as np
import pytest
import torch_pruning
from generation_reference import ask, traced
from views import select, view

from stepprune_jax.policy import layers
from stepprune_jax.pruning import Budget, VisionZip


def plain(score, keys, tokens, dominant, contextual):
    """One image in float64 loops: sources of dominant and of merged tokens, and all tokens."""
    chosen = sorted(sorted(range(len(tokens)), key=lambda i: (-score[i], i))[:dominant])
    remaining = [i for i in range(len(tokens)) if i not in chosen]
    targets = remaining[:: max(1, len(remaining) // contextual)][:contextual]
    counts = {target: [] for target in targets}
    unit = [key / np.sqrt(sum(key**2)) for key in keys]
    for i in remaining:
        if i not in targets:
            likeness = [unit[i] @ unit[target] for target in targets]
            counts[targets[int(np.argmax(likeness))]].append(i)
    merged = [
        tokens[target] + sum(tokens[i] for i in members) / max(1, len(members))
        for target, members in counts.items()
    ]
    return chosen, targets, np.array([*(tokens[i] for i in chosen), *merged])


def test_images_of_any_size_equal_a_plain_loop(monkeypatch):
    """Without a class token; there are ties of attention, keys that are alike, and padding."""
    random, sizes, counts = np.random.default_rng(0), (23, 40, 12), (8, 13, 4)
    tokens = random.standard_normal((3, 40, 6), np.float32)
    received = np.float32(random.integers(0, 9, (3, 40)) / 8)
    keys = random.standard_normal((3, 40, 4), np.float32)
    keys[:, ::5] = keys[:, 1::5]
    valid = np.arange(40) < np.array(sizes)[:, None]
    inputs = view(tokens, received, keys, count=counts, valid=valid)
    kept = select(VisionZip(), inputs, 16)
    assert kept.count.tolist() == list(counts)
    for row, (size, count) in enumerate(zip(sizes, counts, strict=True)):
        merged = max(1, round(5 * count / 32))
        parts = (part[row, :size] for part in (received, keys, tokens))
        chosen, targets, expected = plain(*parts, count - merged, merged)
        place = [*chosen, *targets]
        raster = np.argsort(place)
        assert kept.place[row, :count].tolist() == sorted(place)
        index = [-1 if i in targets else i for i in sorted(place)]
        assert kept.index[row].tolist() == index + [-1] * (16 - count)
        np.testing.assert_allclose(kept.tokens[row, :count], expected[raster], atol=1e-5)
        assert not kept.valid[row, count:].any()
    # Many tokens are compared some at a time: six parts, with two tokens of padding.
    monkeypatch.setattr(layers, "MANY_QUERIES", 8)
    monkeypatch.setattr(layers, "QUERIES", {"default": 7})
    in_parts = jax.jit(lambda inputs: VisionZip().keep(inputs, 16))(inputs)
    np.testing.assert_array_equal(in_parts.index, kept.index)
    np.testing.assert_allclose(in_parts.tokens, kept.tokens, atol=1e-6)


def test_ten_tokens_are_merged_as_in_the_authors_program():
    """The expected values are those of the authors' program for Qwen2.5-VL, with these ratios."""
    received = [0.1, 0.9, 0.2, 0.8, 0.3, 0.7, 0.05, 0.15, 0.25, 0.4]
    keys = [[1, 0], [5, 5], [0, 1], [5, 5], [2, 1], [5, 5], [1, 3], [3, -1], [0, 2], [1, 1]]
    tokens = [[i, 10 * i] for i in range(10)]
    arrays = (np.array([x], np.float32) for x in (tokens, received, keys))
    kept = select(VisionZip(contextual=2), view(*arrays, count=5), 5)
    assert kept.index[0].tolist() == [-1, 1, 3, 5, -1] and kept.place[0].tolist() == [0, 1, 3, 5, 6]
    expected = [[5.5, 55], [1, 10], [3, 30], [5, 50], [37 / 3, 370 / 3]]
    np.testing.assert_allclose(kept.tokens[0], expected, rtol=1e-6)


@pytest.mark.parametrize(("count", "split"), [(192, (162, 30)), (64, (54, 10)), (2, (1, 1))])
def test_five_of_32_are_contextual(count, split):
    assert VisionZip().split(count) == split


def test_generation_equals_the_torch_reference(llava_pair):
    count, dominant, merged = 5, 3, 2

    def choose(tower, pixels):
        hidden, attention, keys = torch_pruning.tower_signals(tower, pixels)
        score = attention.sum(0)
        score[0] = np.inf  # the class token is among the dominant ones
        (_, *chosen), _, tokens = plain(score, keys, hidden, dominant, merged)
        return [-1] + [i - 1 for i in chosen] + [-1] * merged, tokens

    method = VisionZip(Budget("count", count), merged)
    for example in traced(llava_pair, ask(3, seed=count), method, 1):
        torch_pruning.check(llava_pair, example, choose)
