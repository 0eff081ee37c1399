import numpy as np
import pytest
import torch
import torch_pruning
import torch_stages
from generation_reference import ask, traced
from views import select, view

from stepprune_jax.registry import build_pruner


def plain(attention, keys, tokens, name, count=None, neighbours=32):
    """One image in float64 loops: kept patches and tokens; a count of None is adaptive."""
    n = len(tokens)
    if count is None:
        lower, upper = np.percentile(attention, [25, 75])
        share = (attention > upper + 1.5 * (upper - lower)).sum() / n
        number = int(n * share)
    else:
        number = count - 1 if name == "prumerge" else (count - 1) // 4
    kept = torch_stages.best(attention, number).tolist()
    if name == "prumerge_plus" and count is None:
        grid = range(0, n - 1, max(1, int(int(1 / max(share, 1 / n)) / 3)))
        kept += [i for i in grid if i not in kept]
    elif name == "prumerge_plus":
        candidates = [i for i in range(n) if i not in kept]
        num_grid = count - 1 - number
        kept += [candidates[i * len(candidates) // num_grid] for i in range(num_grid)]
    remaining = [i for i in range(n) if i not in kept]
    unit = [key / np.sqrt((key**2).sum()) for key in keys]
    result = []
    for at, i in enumerate(kept):
        dropped = kept[:at] + kept[at + 1 :] + remaining
        likeness = np.array([unit[i] @ unit[j] for j in dropped])
        nearest = [dropped[j] for j in torch_stages.best(likeness, neighbours)]
        result.append(tokens[i] + sum(attention[j] * tokens[j] for j in nearest))
    result.append(sum((attention[i] * tokens[i] for i in remaining), np.zeros(tokens.shape[1])))
    return kept, np.array(result)


def seen(random, r, n, count):
    """A view of random images, and what `plain` wants of each of them."""
    keys = random.standard_normal((r, 2, n + 1, 3)).astype(np.float32)
    query = (2 * random.standard_normal((r, 2, 3))).astype(np.float32)
    query[0] = 0  # no outliers
    tokens = random.standard_normal((r, n, 5)).astype(np.float32)
    scores = np.einsum("rhc,rhmc->rm", query, keys) / np.sqrt(6)
    attention = np.exp(scores) / np.exp(scores).sum(1, keepdims=True)
    rows = (attention[:, 1:], keys[:, :, 1:].swapaxes(1, 2).reshape(r, n, 6), tokens)
    return view(tokens, query, keys, count=count), zip(*rows, strict=True)


@pytest.mark.parametrize("name", ["prumerge", "prumerge_plus"])
@pytest.mark.parametrize(("count", "neighbours"), [(None, 32), (9, 3), (1, 32), (40, 32)])
def test_many_images_equal_a_plain_loop(name, count, neighbours):
    n = 49  # 1 / 49 of 49 patches is less than one patch in double precision
    inputs, rows = seen(np.random.default_rng(0), 20, n, count or n)
    budget = "adaptive" if count is None else count
    pruner = build_pruner(name, budget, options={"neighbours": neighbours})
    kept = select(pruner.program(), inputs, n + 1)
    actual = set()
    for row, (attention, keys, tokens) in enumerate(rows):
        index, expected = plain(attention, keys, tokens, name, count, neighbours)
        length = len(index) + 1
        assert kept.count[row] == length
        assert kept.valid[row].tolist() == [slot < length for slot in range(n + 1)]
        assert kept.index[row].tolist() == index + [-1] * (n + 1 - len(index))
        assert kept.place[row].tolist() == [*index, n - 1] + [0] * (n + 1 - length)
        np.testing.assert_allclose(kept.tokens[row, :length], expected, atol=1e-5)
        assert not np.asarray(kept.tokens)[row, length:].any()
        actual.add(length)
    assert actual == {count} if count else len(actual) > 3


@torch.no_grad()
def last_block(tower, pixels):
    """Attention from the class token [n] with heads side by side, and keys [n, d]."""
    block = getattr(tower, "vision_model", tower).encoder.layers[-1]
    normed = block.layer_norm1(tower(pixels, output_hidden_states=True).hidden_states[-2])[0]
    query, key = block.self_attn.q_proj(normed), block.self_attn.k_proj(normed)
    attention = (query[0] @ key.T / query.shape[1] ** 0.5).softmax(-1)
    return attention[1:].numpy(), key[1:].numpy()


@pytest.mark.parametrize(("name", "budget"), [("prumerge", None), ("prumerge_plus", 10)])
def test_generation_equals_the_torch_reference(deep_pair, name, budget):
    def choose(tower, pixels):
        attention, keys = last_block(tower, pixels)
        tokens = torch_pruning.all_patches(tower, pixels).numpy()
        index, tokens = plain(attention, keys, tokens, name, budget, 4)
        return [*index, -1], tokens

    method = build_pruner(name, budget, options={"neighbours": 4})
    for example in traced(deep_pair, ask(3, seed=budget or 0), method, 1):
        torch_pruning.check(deep_pair, example, choose)
