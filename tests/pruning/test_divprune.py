import jax.numpy as jnp
import numpy as np
import torch_pruning
from generation_reference import ask, traced
from views import select, view

from stepprune_jax.policy import layers
from stepprune_jax.pruning import Budget, DivPrune, Method
from stepprune_jax.pruning.divprune import farthest_first


def order(tokens, count, **others):
    """The order of choice of each row."""
    shown = view(np.asarray(tokens, np.float32), count=count, **others)
    return np.asarray(select(DivPrune(), shown, int(np.max(count))).order)


def test_five_directions_worked_by_hand():
    # Cosines: 01 .8, 02 0, 03 -.6, 04 -1, 12 .6, 13 0, 14 -.8, 23 .8, 24 0, 34 .6. The distances to
    # the nearest neighbours are .2, .2, .2, .2, .4, so token 4 is first. From it the others are 2,
    # 1.8, 1, .4 away; from 0 and 4 then .2, 1, .4; and from 0, 2 and 4 both are .2 away.
    directions = np.array([[1, 0], [4, 3], [0, 1], [-3, 4], [-1, 0]])
    lengths = np.array([[1], [2], [0.5], [1], [4]])
    for count, row in enumerate(order([directions * lengths] * 5, range(1, 6)).tolist(), start=1):
        assert row == [4, 0, 2, 1, 3][:count] + [-1] * (5 - count)
    kept = select(DivPrune(), view(np.float32(directions * lengths)[None], count=3), 4)
    assert kept.index[0].tolist() == [0, 2, 4, -1] and kept.count.tolist() == [3]
    np.testing.assert_array_equal(kept.tokens[0, 1], [0, 0.5])


def plain(tokens, count):
    """One image in loops."""
    unit = [token / np.sqrt(token @ token) for token in tokens]
    n, chosen = len(unit), []
    for _ in range(count):
        best, best_distance = None, None
        for i in range(n):
            if i in chosen:
                continue
            others = chosen or [j for j in range(n) if j != i]
            distance = min((1 - unit[i] @ unit[j] for j in others), default=2)
            if best is None or distance > best_distance:
                best, best_distance = i, distance
        chosen.append(best)
    return chosen


def test_many_images_equal_a_plain_loop():
    random = np.random.default_rng(0)
    for n, d in ((1, 3), (9, 3), (16, 8), (40, 12)):
        tokens = random.standard_normal((12, n, d)) + random.standard_normal((12, 1, d))
        tokens = tokens.astype(np.float32)
        expected = [plain(image.astype(np.float64), n) for image in tokens]
        np.testing.assert_array_equal(order(tokens, n), expected)


def test_ties_and_equal_tokens_go_to_the_earlier_one():
    """Vectors of four signs, 16 in all, have lengths and cosines without rounding."""
    random = np.random.default_rng(1)
    tokens = random.choice([-1.0, 1.0], (30, 20, 4))
    expected = [plain(image, 20) for image in tokens]
    np.testing.assert_array_equal(order(tokens, 20), expected)


def test_images_differ_in_size_and_padding_is_not_read():
    random = np.random.default_rng(2)
    sizes, counts = np.array([9, 1, 5]), [4, 1, 5]
    tokens = random.standard_normal((3, 9, 4), np.float32)
    valid = np.arange(9) < sizes[:, None]
    shown = np.where(valid[..., None], tokens, np.nan)
    found = order(shown, counts, valid=valid)
    for row, (size, count) in enumerate(zip(sizes, counts, strict=True)):
        expected = plain(tokens[row, :size].astype(np.float64), count)
        assert found[row].tolist() == expected + [-1] * (5 - count)
    # Angles of 0, 110 and 240 degrees, all farther from one another than from a vector of zeros.
    angles = np.deg2rad([0, 110, 240])
    tokens = np.append(np.stack([np.cos(angles), np.sin(angles)], axis=1), [[0, 0]], axis=0)
    assert order([tokens], 3, valid=[[True, True, True, False]])[0].tolist() == [2, 1, 0]


def test_many_tokens_are_compared_some_at_a_time(monkeypatch):
    unit = np.random.default_rng(3).choice([-0.5, 0.5], (2, 23, 4))
    arrays = jnp.asarray(unit, jnp.float32), jnp.ones((2, 23), bool)
    at_once = farthest_first(*arrays, 6)
    monkeypatch.setattr(layers, "MANY_QUERIES", 8)
    monkeypatch.setattr(layers, "QUERIES", 7)
    np.testing.assert_array_equal(farthest_first(*arrays, 6), at_once)


def test_generation_equals_the_torch_reference(llava_pair):
    def choose(tokens, tower, pixels):
        kept = sorted(plain(tokens.numpy(), 4))
        return kept, tokens[kept]

    for asked in traced(llava_pair, ask(3, seed=4), Method(DivPrune(Budget("count", 4))), 1):
        torch_pruning.check(llava_pair, asked, choose, projected=True)
