import numpy as np
import pytest
import torch_pruning
from generation_reference import ask, traced
from views import select, view

from stepprune_jax.pruning import Budget, Method, VisionZip


def plain(attention, keys, hidden, dominant, contextual):
    """One image in float64 loops: tokens and their sources."""
    m = len(hidden)
    by_attention = sorted(range(1, m), key=lambda i: (-attention[i], i))
    chosen = sorted([0, *by_attention[: dominant - 1]])
    rest = [i for i in range(m) if i not in chosen]
    step = max(1, len(rest) // contextual)
    targets = rest[::step][:contextual]
    given = {target: [] for target in targets}
    unit = [key / np.sqrt(sum(key**2)) for key in keys]
    for i in rest:
        if i in targets:
            continue
        best, likeness = None, -np.inf
        for target in targets:
            cosine = unit[i] @ unit[target]
            if cosine > likeness:
                best, likeness = target, cosine
        given[best].append(i)
    merged = [
        hidden[target] + sum(hidden[i] for i in members) / max(1, len(members))
        for target, members in given.items()
    ]
    return np.array([*(hidden[i] for i in chosen), *merged]), [*chosen, *targets]


# The class token and eight patches.
HEADS = np.array(
    [
        [0.1, 0.05, 0.2, 0.1, 0.05, 0.25, 0.05, 0.05, 0.15],
        [0.2, 0.05, 0.3, 0.05, 0.1, 0.05, 0.15, 0.05, 0.05],
    ]
)
KEYS = [[9, 9], [1, 0], [0, 1], [1, 1], [2, 0], [0, 3], [1, 2], [3, 1], [1, -1]]
HIDDEN = [[i, 10 * i] for i in range(9)]


def merged(attention, keys, hidden, dominant, contextual):
    """One head of an image and its class token: tokens, and where among all they come from."""
    attention, keys, hidden = (np.asarray(x, np.float32)[None] for x in (attention, keys, hidden))
    shown = view(hidden[:, 1:], attention[None], keys[None], hidden, count=dominant + contextual)
    kept = select(VisionZip(contextual=contextual), shown, dominant + contextual)
    place = kept.place[0].tolist()
    # The class token is no patch, and what is merged is none alone.
    assert place[0] == 0
    assert kept.index[0].tolist() == [-1, *place[1:dominant], *[-1] * contextual]
    return np.asarray(kept.tokens[0]), [0, *(patch + 1 for patch in place[1:])]


def test_an_image_worked_by_hand():
    # The heads' sums over the patches are [.1 .5 .15 .15 .3 .2 .1 .2]: of three dominant tokens
    # two are patches 1 and 4, tokens 2 and 5. Left are 1, 3, 4, 6, 7 and 8; every third is a
    # target, 1 and 6. Token 3 is most like 6, tokens 4, 7 and 8 like 1.
    tokens, source = merged(HEADS.sum(0), KEYS, HIDDEN, 3, 2)
    assert source == [0, 2, 5, 1, 6]
    expected = [[0, 0], [2, 20], [5, 50], [22 / 3, 220 / 3], [9, 90]]
    np.testing.assert_allclose(tokens, expected, rtol=1e-6)


def test_a_hundred_images_equal_a_plain_loop():
    random = np.random.default_rng(0)
    for case in range(100):
        m, (dominant, contextual) = 10, [(3, 2), (1, 1), (4, 5), (8, 1), (2, 5)][case % 5]
        # Few values, so that there are ties of attention; keys far apart or exactly alike.
        attention = random.integers(0, 4, m) / 8
        keys = random.standard_normal((m, 4))
        keys[random.integers(1, m, 4)] = keys[random.integers(1, m, 4)]
        keys, hidden = keys.astype(np.float32), random.standard_normal((m, 3)).astype(np.float32)
        tokens, source = merged(attention, keys, hidden, dominant, contextual)
        expected, sources = plain(attention, keys, hidden, dominant, contextual)
        assert source == sources
        np.testing.assert_allclose(tokens, expected, atol=1e-5)


@pytest.mark.parametrize(
    ("count", "split"),
    [(192, (162, 30)), (128, (108, 20)), (64, (54, 10)), (4, (3, 1)), (2, (1, 1))],
)
def test_five_of_32_are_contextual(count, split):
    assert VisionZip().split(count) == split
    assert VisionZip(contextual=1).split(count) == (count - 1, 1)


@pytest.mark.parametrize(
    ("count", "contextual"), [(5, 2), pytest.param(4, None, marks=pytest.mark.slow)]
)
def test_generation_equals_the_torch_reference(llava_pair, count, contextual):
    pruner = VisionZip(Budget("count", count), contextual)
    dominant, merged = map(int, pruner.split(count))

    def choose(tower, pixels):
        hidden, attention, keys = torch_pruning.tower_signals(tower, pixels)
        tokens, source = plain(attention.sum(0), keys, hidden, dominant, merged)
        return [i - 1 for i in source[:dominant]] + [-1] * merged, tokens

    for asked in traced(llava_pair, ask(3, seed=count), Method(pruner), 1):
        torch_pruning.check(llava_pair, asked, choose)
