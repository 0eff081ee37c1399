import numpy as np
import pytest
import torch
import torch_pruning
from generation_reference import ask, request, traced
from views import select, view

from stepprune_jax.pruning import Budget, CDPruner

SPLIT = {"relevance_weight": 0.5, "split_threshold": 7}


def order(tokens, words, count, valid=None, text_valid=None, **options):
    """The order of choice of each row, given words [r, l, e]."""
    tokens, words = (np.asarray(x, np.float32) for x in (tokens, words))
    text_valid = np.ones(words.shape[:2], bool) if text_valid is None else text_valid
    optional = {} if valid is None else {"valid": valid}
    inputs = view(tokens, count=count, text=words, text_valid=text_valid, **optional)
    return np.asarray(select(CDPruner(**options), inputs, int(np.max(count))).order)


def determinant_order(tokens, words, count, theta=None, relevance_weight=1.0, split_threshold=0):
    """One image, by determinants of all larger sets; halves one after the other."""
    n, question = len(tokens), words.mean(0) if len(words) else np.zeros(tokens.shape[1])
    parts = [range(n)]
    if 0 < split_threshold < n:
        parts = [range(n // 2, n), range(n // 2)]
    orders = []
    for turn, part in enumerate(parts):
        unit = [tokens[i] / np.sqrt(tokens[i] @ tokens[i]) for i in part]
        relevance = np.array([x @ question for x in unit])
        quality = np.ones(len(relevance))
        if np.ptp(relevance) > 0:
            quality = (relevance - relevance.min()) / np.ptp(relevance)
        if theta is not None:
            quality = np.exp(theta / (2 * (1 - theta)) * quality)
        kernel = np.array([[x @ y for y in unit] for x in unit])
        kernel *= 1 - relevance_weight + relevance_weight * np.outer(quality, quality)
        chosen = []
        for _ in range(count // len(parts) + (turn < count % len(parts))):
            candidates = [i for i in range(len(unit)) if i not in chosen]
            sets = [np.ix_([*chosen, i], [*chosen, i]) for i in candidates]
            values = [np.linalg.det(kernel[indices]) for indices in sets]
            chosen.append(candidates[int(np.argmax(values))])
        orders.append([part[i] for i in chosen])
    return [orders[step % len(parts)][step // len(parts)] for step in range(count)]


@pytest.mark.parametrize("options", [{}, {"theta": 0.8}, {"relevance_weight": 0.5}, SPLIT])
def test_images_and_questions_of_any_size_equal_the_largest_determinants(options):
    """Neither the padding of images nor that of questions is read."""
    random = np.random.default_rng(3)
    sizes, lengths, counts = (np.tile(x, 8) for x in ([33, 1, 6], [3, 2, 1], [12, 1, 5]))
    tokens, words = random.standard_normal((24, 33, 24)), random.standard_normal((24, 3, 24))
    valid, text_valid = (np.arange(m) < x[:, None] for m, x in ((33, sizes), (3, lengths)))
    image = np.where(valid[..., None], tokens, np.nan)
    text = np.where(text_valid[..., None], words, np.nan)
    actual = order(image, text, counts, valid, text_valid, **options)
    for row, (size, length, count) in enumerate(zip(sizes, lengths, counts, strict=True)):
        expected = determinant_order(tokens[row, :size], words[row, :length], count, **options)
        assert actual[row].tolist() == expected + [-1] * (12 - count)


def test_ties_and_equal_tokens_go_to_the_earlier_one():
    """Axes, each there more than once: all that a choice leaves is 1 or 0, without rounding."""
    random = np.random.default_rng(1)
    signs, axes = random.choice([-1, 1], (20, 14, 1)), np.eye(6)[random.integers(6, size=(20, 14))]
    tokens, words, none = signs * axes, np.zeros((20, 1, 6)), np.zeros((20, 1), bool)
    expected = [determinant_order(image, words[0, :0], 14) for image in tokens]
    np.testing.assert_array_equal(order(tokens, words, 14, text_valid=none), expected)


def test_more_tokens_than_dimensions_are_all_put_in_an_order():
    random, sizes = np.random.default_rng(2), np.array([40, 39, 30, 20, 13])
    tokens = random.standard_normal((5, 40, 6))
    tokens[:, 1::4] = tokens[:, ::4]
    tokens[:, 7] = 0
    valid = np.arange(40) < sizes[:, None]
    actual = order(tokens, random.standard_normal((5, 2, 6)), sizes, valid, **SPLIT)
    for row, size in enumerate(sizes):
        np.testing.assert_array_equal(np.sort(actual[row, :size]), np.arange(size))


def test_generation_equals_the_torch_reference(llava_pair):
    pruner = CDPruner(Budget("count", 4))
    table = llava_pair.theirs.model.get_input_embeddings()
    for example in traced(llava_pair, ask(3, seed=4), pruner, 1):
        ids = request(llava_pair.ours, example.prompt, example.images).question_ids[0]
        words = table(torch.tensor(ids)).detach().numpy()

        def choose(tokens, tower, pixels, words=words):
            kept = sorted(determinant_order(tokens.numpy(), words, 4))
            return kept, tokens[kept]

        torch_pruning.check(llava_pair, example, choose, projected=True)


def test_tiles_are_chosen_from_separately_in_turn():
    """Each as if alone; the ends of rows follow when no patch is left."""
    tile = np.array([0, 1, 1, -1, 0, 1, 0, -1, 0, 0])
    tokens = np.random.default_rng(0).standard_normal((1, 10, 4), np.float32)

    def chosen(places, *taps):
        inputs = view(tokens[:, places], *taps, count=1, text=np.zeros((1, 1, 4)))
        return places[np.asarray(CDPruner().rank(inputs, len(places)).order[0])].tolist()

    order = chosen(np.arange(10), tile[None])
    first, second = (chosen(np.flatnonzero(tile == part)) for part in (0, 1))
    assert order[:6] == [place for both in zip(first, second, strict=False) for place in both]
    assert order[6:8] == first[3:] and sorted(order[8:]) == [3, 7]
