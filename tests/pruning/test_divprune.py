import jax.numpy as jnp
import numpy as np
import torch_pruning
from generation_reference import ask, traced
from views import select, view

from stepprune_jax.policy import layers
from stepprune_jax.pruning import Budget, DivPrune
from stepprune_jax.pruning.divprune import farthest_first


def order(tokens, count, **others):
    """The order of choice of each row."""
    inputs = view(np.asarray(tokens, np.float32), count=count, **others)
    return np.asarray(select(DivPrune(), inputs, int(np.max(count))).order)


def plain(tokens, count):
    """One image in loops."""
    unit = [token / np.sqrt(token @ token) for token in tokens]
    n, chosen = len(unit), []
    for _ in range(count):
        distance = {}
        for i in set(range(n)) - set(chosen):
            references = chosen or [j for j in range(n) if j != i]
            distance[i] = min((1 - unit[i] @ unit[j] for j in references), default=2)
        chosen.append(min(distance, key=lambda i: (-distance[i], i)))
    return chosen


def test_images_of_any_size_equal_a_plain_loop_and_padding_is_not_read():
    random = np.random.default_rng(2)
    sizes, counts = np.tile([40, 1, 9], 6), np.tile([40, 1, 5], 6)
    tokens = random.standard_normal((18, 40, 12)) + random.standard_normal((18, 1, 12))
    valid = np.arange(40) < sizes[:, None]
    actual = order(np.where(valid[..., None], tokens, np.nan), counts, valid=valid)
    for row, (size, count) in enumerate(zip(sizes, counts, strict=True)):
        assert actual[row].tolist() == plain(tokens[row, :size], count) + [-1] * (40 - count)
    # Angles of 0, 110 and 240 degrees, all farther from one another than from a vector of zeros.
    angles = np.deg2rad([0, 110, 240])
    tokens = np.append(np.stack([np.cos(angles), np.sin(angles)], axis=1), [[0, 0]], axis=0)
    assert order([tokens], 3, valid=[[True, True, True, False]])[0].tolist() == [2, 1, 0]


def test_ties_and_equal_tokens_go_to_the_earlier_one():
    """Vectors of four signs, 16 in all, have lengths and cosines without rounding."""
    random = np.random.default_rng(1)
    tokens = random.choice([-1.0, 1.0], (30, 20, 4))
    expected = [plain(image, 20) for image in tokens]
    np.testing.assert_array_equal(order(tokens, 20), expected)


def test_many_tokens_are_compared_some_at_a_time(monkeypatch):
    unit = np.random.default_rng(3).choice([-0.5, 0.5], (2, 23, 4))
    arrays = jnp.asarray(unit, jnp.float32), jnp.ones((2, 23), bool)
    at_once = farthest_first(*arrays, 6)
    monkeypatch.setattr(layers, "MANY_QUERIES", 8)
    monkeypatch.setattr(layers, "QUERIES", {"default": 7})
    np.testing.assert_array_equal(farthest_first(*arrays, 6), at_once)


def test_generation_equals_the_torch_reference(llava_pair):
    def choose(tokens, tower, pixels):
        kept = sorted(plain(tokens.numpy(), 4))
        return kept, tokens[kept]

    for example in traced(llava_pair, ask(3, seed=4), DivPrune(Budget("count", 4)), 1):
        torch_pruning.check(llava_pair, example, choose, projected=True)
