import numpy as np
import pytest
import torch
import torch_pruning
from generation_reference import ask, request, traced
from views import select, view

from stepprune_jax.pruning import Budget, CDPruner, Method

SPLIT = {"relevance_weight": 0.5, "split_threshold": 1}
VARIANTS = [{}, {"theta": 0.8}, {"relevance_weight": 0.5}, SPLIT, SPLIT | {"split_threshold": 7}]


def order(tokens, words, count, valid=None, text_valid=None, **options):
    """The order of choice of each row, given words [r, l, e]."""
    tokens, words = (np.asarray(x, np.float32) for x in (tokens, words))
    text_valid = np.ones(words.shape[:2], bool) if text_valid is None else text_valid
    others = {} if valid is None else {"valid": valid}
    shown = view(tokens, count=count, text=words, text_valid=text_valid, **others)
    return np.asarray(select(CDPruner(**options), shown, int(np.max(count))).order)


# Two along the question, one halfway off, one across; lengths do not matter.
TOKENS = [[1, 0, 0], [2, 0, 0], [3, 4, 0], [0, 0, 1]]
WORDS = [[3, 1, 0], [1, -1, 0]]


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        # Relevance is 1, 1, .6 and 0, so that token 0 is first. Of the square of each, the others
        # then keep 0, .36 * (1 - .36) and nearly 0.
        ({}, [0, 2]),
        # Half without relevance: 1, 1, .68 and .5 at first, then 0, .68 - .48^2 = .4496 and .5.
        ({"relevance_weight": 0.5}, [0, 3, 2, 1]),
        ({"relevance_weight": 0.0}, [0, 3, 2, 1]),
        # exp of the relevance, as theta / (2 - 2 theta) is 1/2 and the kernel has its square: token
        # 2 has exp(.6) * .64 = 1.17 left, and token 3 has 1.
        ({"theta": 0.5}, [0, 2, 3, 1]),
        # Tokens 2 and 3, then 0 and 1: relevance is 1 and 0, or 1 and 1, and no token of the other
        # half makes one less worth.
        ({"split_threshold": 3}, [2, 0, 3, 1]),
        ({"split_threshold": 4}, [0, 2]),
    ],
)
def test_four_tokens_worked_by_hand(options, expected):
    counts = range(1, len(expected) + 1)  # one a row
    found = order([TOKENS] * len(expected), [WORDS] * len(expected), counts, **options)
    for row, count in zip(found.tolist(), counts, strict=True):
        assert row == expected[:count] + [-1] * (len(expected) - count)


def determinant_order(tokens, words, count, theta=None, relevance_weight=1.0, split_threshold=0):
    """One image, by determinants of all larger sets; halves one after the other."""
    n, question = len(tokens), words.mean(0) if len(words) else np.zeros(tokens.shape[1])
    parts = [range(n)]
    if 0 < split_threshold < n:
        parts = [range(n // 2, n), range(n // 2)]
    orders = []
    for turn, part in enumerate(parts):
        unit = [tokens[i] / np.sqrt(tokens[i] @ tokens[i]) for i in part]
        seen = np.array([x @ question for x in unit])
        quality = np.ones(len(seen))
        if np.ptp(seen) > 0:
            quality = (seen - seen.min()) / np.ptp(seen)
        if theta is not None:
            quality = np.exp(theta / (2 * (1 - theta)) * quality)
        kernel = np.array([[x @ y for y in unit] for x in unit])
        kernel *= 1 - relevance_weight + relevance_weight * np.outer(quality, quality)
        chosen = []
        for _ in range(count // len(parts) + (turn < count % len(parts))):
            left = [i for i in range(len(unit)) if i not in chosen]
            sets = [[*chosen, i] for i in left]
            values = [np.linalg.det(kernel[np.ix_(some, some)]) for some in sets]
            chosen.append(left[int(np.argmax(values))])
        orders.append([part[i] for i in chosen])
    return [orders[step % len(parts)][step // len(parts)] for step in range(count)]


@pytest.mark.parametrize("options", VARIANTS)
def test_many_images_equal_the_largest_determinants(options):
    random = np.random.default_rng(0)
    others = [(1, 3, 1), (16, 24, 9)] if not options else []
    for n, d, count in [(7, 8, 5), (33, 24, 12), *others]:
        tokens = random.standard_normal((10, n, d)) + random.standard_normal((10, 1, d))
        words = random.standard_normal((10, 3, d))
        expected = [
            determinant_order(*pair, count, **options) for pair in zip(tokens, words, strict=True)
        ]
        np.testing.assert_array_equal(order(tokens, words, count, **options), expected)


@pytest.mark.parametrize("split_threshold", [0, 1])
def test_ties_and_equal_tokens_go_to_the_earlier_one(split_threshold):
    """Axes, each there more than once: all that a choice leaves is 1 or 0, without rounding."""
    random = np.random.default_rng(1)
    signs, axes = random.choice([-1, 1], (20, 14, 1)), np.eye(6)[random.integers(6, size=(20, 14))]
    tokens, words, none = signs * axes, np.zeros((20, 1, 6)), np.zeros((20, 1), bool)
    options = {"split_threshold": split_threshold}
    expected = [determinant_order(image, words[0, :0], 14, **options) for image in tokens]
    np.testing.assert_array_equal(order(tokens, words, 14, text_valid=none, **options), expected)


@pytest.mark.parametrize("options", [{}, SPLIT])
def test_more_tokens_than_dimensions_are_all_put_in_an_order(options):
    random, sizes = np.random.default_rng(2), np.array([40, 39, 30, 20, 13])
    tokens = random.standard_normal((5, 40, 6))
    tokens[:, 1::4] = tokens[:, ::4]
    tokens[:, 7] = 0
    valid = np.arange(40) < sizes[:, None]
    found = order(tokens, random.standard_normal((5, 2, 6)), sizes, valid, **options)
    for row, size in enumerate(sizes):
        np.testing.assert_array_equal(np.sort(found[row, :size]), np.arange(size))


@pytest.mark.parametrize("options", VARIANTS)
def test_images_and_questions_differ_in_size_and_padding_is_not_read(options):
    random = np.random.default_rng(3)
    sizes, lengths, counts = np.array([9, 1, 6]), np.array([3, 2, 1]), [4, 1, 5]
    tokens, words = random.standard_normal((3, 9, 12)), random.standard_normal((3, 3, 12))
    valid, text_valid = (np.arange(m) < x[:, None] for m, x in ((9, sizes), (3, lengths)))
    junk = (
        np.where(mask[..., None], x, np.nan) for mask, x in ((valid, tokens), (text_valid, words))
    )
    found = order(*junk, counts, valid, text_valid, **options)
    for row, (size, length, count) in enumerate(zip(sizes, lengths, counts, strict=True)):
        expected = determinant_order(tokens[row, :size], words[row, :length], count, **options)
        assert found[row].tolist() == expected + [-1] * (5 - count)


def test_generation_equals_the_torch_reference(llava_pair):
    pruner = CDPruner(Budget("count", 4))
    table = llava_pair.theirs.model.get_input_embeddings()
    for asked in traced(llava_pair, ask(3, seed=4), Method(pruner), 1):
        ids = request(llava_pair.ours, asked.prompt, asked.images).question_ids[0]
        words = table(torch.tensor(ids)).detach().numpy()

        def choose(tokens, tower, pixels, words=words):
            kept = sorted(determinant_order(tokens.numpy(), words, 4))
            return kept, tokens[kept]

        torch_pruning.check(llava_pair, asked, choose, projected=True)
