import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch_stages
from generation_reference import ask, traced
from views import llava, rows

from stepprune_jax.pruning import Budget, SparseVLM, SparseVLMv2, Survivors
from stepprune_jax.pruning.sparsevlm import cluster_and_merge, rate_text, rater_mean

LLAVA = llava(side=192)  # of 576 visual tokens
run_clusters = jax.jit(cluster_and_merge, static_argnames=("max_clusters", "noise"))
run_raters = jax.jit(rate_text, static_argnums=2)


@pytest.mark.parametrize(
    ("kind", "budget", "behind"),
    [
        (SparseVLM, 192, [309, 204, 113]),
        (SparseVLM, 64, [82, 32, 18]),
        (SparseVLMv2, 192, [300, 200, 118]),
    ],
)
def test_the_authors_lists_leave_what_they_print(kind, budget, behind):
    pruner = kind(Budget("count", budget))
    pruner.check(LLAVA, 576)
    assert [cut.layer for cut in pruner.cuts(LLAVA, 576)] == [3, 7, 16]
    assert [sum(remaining) for remaining in pruner.schedule(LLAVA, 576).after] == behind


@pytest.mark.parametrize("kind", [SparseVLM, SparseVLMv2])
@pytest.mark.parametrize("budget", [400, 56])
def test_other_budgets_are_met_by_one_ratio(kind, budget):
    pruner = kind(Budget("count", budget))
    pruner.check(LLAVA, 576)
    counts = [576, *map(sum, pruner.schedule(LLAVA, 576).after)]
    assert counts == sorted(counts, reverse=True)
    mean = sum(w * n for w, n in zip((2, 4, 9, 17), counts, strict=True)) / 32
    assert budget - 1 < mean <= budget
    last = kind(Budget("count", budget), average=False)
    last.check(LLAVA, 576)
    assert sum(last.schedule(LLAVA, 576).after[-1]) == budget


def test_a_list_decides_and_keeps_one_fewer_at_most():
    # A third of 144 tokens: a quarter of the authors' list for 192 of 576.
    after = SparseVLM(Budget("count", 48)).schedule(LLAVA, 144).after
    assert [remaining.kept for remaining in after] == [75, 50, 27]
    # With lists of one token, the budget falls to none, and nothing is recycled.
    for kind, counts, n, expected in (
        (SparseVLM, (576, 30, 30), 576, ((575, 1), (30, 17), (30, 1))),
        (SparseVLMv2, (576, 30, 30), 576, ((575,), (30,), (29,))),
        (SparseVLM, (1, 1, 1), 1, ((0, 1), (0, 1), (0, 1))),
        (SparseVLMv2, (1, 1, 1), 9, ((1,), (0,), (0,))),
    ):
        pruner = kind(sparse_token_list=counts, pruning_loc=(2, 6, 15))
        assert pruner.schedule(LLAVA, n).after == tuple(Survivors(*x) for x in expected)


def test_shallow_models_are_pruned_at_the_same_share_of_their_depth():
    assert [cut.layer for cut in SparseVLM().cuts(llava(16, 192), 576)] == [1, 3, 8]
    assert [cut.layer for cut in SparseVLM().cuts(llava(4, 192), 576)] == [1, 2]


def test_rows_without_an_image_or_without_text_behind_it_have_no_raters():
    hidden = np.random.default_rng(0).standard_normal((2, 6, 2))
    sequence = rows([[-1] * 6, [-1, -1, 0, 0, 0, 0]], hidden)
    raters = run_raters(sequence.hidden, sequence, 4)
    assert not raters.any()
    score = rater_mean(jnp.ones((2, 4, 6)), sequence._replace(note=raters))
    np.testing.assert_array_equal(score, 0)


def test_two_densest_tokens_that_tie_are_both_centres_unless_there_is_noise():
    x = jnp.asarray([0, 0.3, 0.7, 4, 4.9, 10])[:, None]
    merged, centre = run_clusters(x, 6, 2, max_clusters=2)
    np.testing.assert_array_equal(centre, [0, 1])
    np.testing.assert_allclose(merged[:, 0], [0, 19.9 / 5], rtol=1e-5)
    _, centre = run_clusters(x, 6, 2, max_clusters=2, noise=1e-6)
    assert sorted(centre.tolist())[0] in (0, 1) and sorted(centre.tolist())[1] not in (0, 1)


def plain_recycled(score, x, slots, count):
    """One image in float64 loops: slots that are kept, the clusters, and their centres' slots."""
    best = sorted(slots, key=lambda i: (-score[i], i))
    kept, dropped = sorted(best[:count]), best[count:]
    if not dropped:
        return kept, [], []
    dropped = dropped[: int(len(dropped) * 0.3) + 1]
    c = int(len(dropped) / 10) + 1
    root = np.sqrt(x.shape[1])
    distance = {
        (i, j): np.linalg.norm(x[i] - x[j]) / root for i, j in itertools.product(dropped, dropped)
    }
    density, peak = {}, {}
    for i in dropped:
        nearest = sorted(distance[i, j] for j in dropped)[:c]
        density[i] = np.exp(-np.mean(np.square(nearest)))
    for i in dropped:
        denser = [distance[i, j] for j in dropped if density[j] > density[i]]
        peak[i] = density[i] * min(denser, default=max(distance.values()))
    centres = sorted(dropped, key=lambda i: (-peak[i], dropped.index(i)))[:c]
    members = {i: [i] for i in centres}
    for i in dropped:
        if i not in centres:
            members[min(centres, key=lambda j: (distance[i, j], centres.index(j)))].append(i)
    return kept, [x[own].sum(0) / (len(own) + 1e-6) for own in members.values()], centres


def raters_of(entered):
    """Which tokens of a prompt are raters, counted from its end."""
    row = entered[0]
    x, last = row.hidden[0].numpy(), np.flatnonzero(row.image >= 0)[-1]
    likeness = x[row.image >= 0] @ x[last + 1 :].T
    share = np.exp(likeness - likeness.max(1, keepdims=True))
    rating = (share / share.sum(1, keepdims=True)).mean(0)
    return np.flatnonzero(rating > rating.mean()) - len(rating)


def score_of(core, layer, entered, heads):
    """What the raters give to every token; with `heads`, as version 2 has it."""
    row = entered[layer]
    slots = row.hidden.shape[1] + raters_of(entered)
    weights = torch_stages.attention(core, layer, row, slots)
    if heads is not None:
        cosine, sine = (x[0].numpy() for x in core.rotary_emb(row.hidden, row.position))
        half = cosine.shape[1] // 2
        ones = np.concatenate([(cosine - sine)[:, :half], (cosine + sine)[:, half:]], axis=1)
        weights = weights / (ones[slots] @ ones.T / np.sqrt(2 * half))
        chosen = torch_stages.best(weights[:, :, row.image >= 0].sum((1, 2)), heads)
        weights = weights[chosen]
    return weights.mean(0).mean(0)


def dropping(layer, count, heads):
    """What is left behind a layer; with `heads`, as version 2 has it."""

    def drop(core, entered):
        row = entered[-1]
        images = row.image.max() + 1
        if not images:
            return row
        score = score_of(core, layer, entered, heads)
        if heads is not None:
            return torch_stages.keeping_best(score, row, [count] * images)
        kept, merged = [], []
        for image in range(images):
            states = row.hidden[0].numpy().astype(np.float64)
            own, clusters, _ = plain_recycled(score, states, row.span(image).tolist(), count)
            kept.append(np.array(own, int))
            merged.append(clusters)
        after = row.dropping(kept)
        for image, clusters in enumerate(merged):
            after = after.inserting(image, np.array(clusters))
        return after

    return drop


@pytest.mark.parametrize(
    ("kind", "counts", "options"),
    [(SparseVLM, (4, 2), {"noise": 0.0}), (SparseVLMv2, (20, 3), {"heads": 2})],
)
def test_generation_equals_the_torch_reference(deep_pair, kind, counts, options):
    heads = options.get("heads")
    pruner = kind(pruning_loc=(0, 1), sparse_token_list=counts, **options)
    drops = {loc + 1: dropping(loc, count, heads) for loc, count in enumerate(counts)}
    for example in traced(deep_pair, ask(3, seed=2), pruner, 4):
        last = torch_stages.check(deep_pair, example, drops, renumber=heads is None)[-1]
        merged = (last.index < 0) & (last.image >= 0)
        assert merged.any() == (heads is None and len(example.images) > 0)
