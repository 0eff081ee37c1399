import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch_stages
from generation_reference import ask, pair, traced
from views import llava, rows

from stepprune_jax.pruning import Budget, Method, SparseVLM, SparseVLMv2, Survivors
from stepprune_jax.pruning.ordering import keep_best
from stepprune_jax.pruning.sparsevlm import (
    cluster_and_merge,
    num_clusters,
    rate_text,
    rater_mean,
    recycle,
    without_positions,
)

LLAVA = llava(side=192)  # of 576 visual tokens
run_clusters = jax.jit(cluster_and_merge, static_argnames=("most", "noise"))
run_raters = jax.jit(rate_text, static_argnums=2)


@pytest.mark.parametrize(
    ("kind", "budget", "behind", "mean", "entering_mean"),
    [
        (SparseVLM, 192, [309, 204, 113], 192.03, 206.5),
        (SparseVLM, 128, [312, 117, 39], 128.63, 145.4),
        (SparseVLM, 96, [249, 55, 27], 96.94, 114.1),
        (SparseVLM, 64, [82, 32, 18], 64.81, 82.25),
        (SparseVLMv2, 192, [300, 200, 118], None, None),
        (SparseVLMv2, 128, [238, 108, 60], None, None),
        (SparseVLMv2, 96, [246, 54, 28], None, None),
        (SparseVLMv2, 64, [66, 34, 20], None, None),
    ],
)
def test_the_authors_lists_leave_what_they_print(kind, budget, behind, mean, entering_mean):
    pruner = kind(Budget("count", budget))
    pruner.check(LLAVA, 576)
    assert [cut.layer for cut in pruner.cuts(LLAVA, 576)] == [3, 7, 16]
    counts = [sum(left) for left in pruner.survivors(LLAVA, 576)]
    assert counts == behind
    if mean is None:
        return
    a, b, c = counts
    assert (2 * 576 + 4 * a + 9 * b + 17 * c) / 32 == pytest.approx(mean, abs=0.006)
    assert np.mean(pruner.layer_tokens(LLAVA, 576)) == pytest.approx(entering_mean, abs=0.06)


def test_lists_follow_the_share_of_an_image():
    # A third of 144 tokens: a quarter of the list for 192 of 576.
    kept = [left.kept for left in SparseVLM(Budget("count", 48)).survivors(LLAVA, 144)]
    assert kept == [75, 50, 27]


@pytest.mark.parametrize("kind", [SparseVLM, SparseVLMv2])
@pytest.mark.parametrize("budget", [400, 150, 70, 56])
def test_other_budgets_are_met_by_one_ratio(kind, budget):
    pruner = kind(Budget("count", budget))
    pruner.check(LLAVA, 576)
    counts = [576, *map(sum, pruner.survivors(LLAVA, 576))]
    assert counts == sorted(counts, reverse=True)
    mean = sum(w * n for w, n in zip((2, 4, 9, 17), counts, strict=True)) / 32
    assert budget - 1 < mean <= budget
    last = kind(Budget("count", budget), average=False)
    last.check(LLAVA, 576)
    assert sum(last.survivors(LLAVA, 576)[-1]) == budget


def test_a_list_decides_and_keeps_one_fewer_at_most():
    pruner = SparseVLM(sparse_token_list=(576, 30, 30), pruning_loc=(2, 6, 15))
    assert pruner.survivors(LLAVA, 576) == (
        Survivors(575, 1),
        Survivors(30, num_clusters(546)[1]),
        Survivors(30, 1),
    )
    v2 = SparseVLMv2(sparse_token_list=(576, 30, 30), pruning_loc=(2, 6, 15))
    assert v2.survivors(LLAVA, 576) == (Survivors(575), Survivors(30), Survivors(29))
    # Down to none, where nothing is recycled.
    one = dict(sparse_token_list=(1, 1, 1), pruning_loc=(2, 6, 15))
    assert SparseVLMv2(**one).survivors(LLAVA, 9) == (
        Survivors(1),
        Survivors(0),
        Survivors(0),
    )
    assert SparseVLM(**one).survivors(LLAVA, 9) == (Survivors(1, 1),) * 3
    assert SparseVLM(**one).survivors(LLAVA, 1) == (Survivors(0, 1),) * 3


def test_shallow_models_are_pruned_at_the_same_share_of_their_depth():
    assert [cut.layer for cut in SparseVLM().cuts(llava(16, 192), 576)] == [1, 3, 8]
    assert [cut.layer for cut in SparseVLM().cuts(llava(4, 192), 576)] == [1, 2]


def test_raters_are_what_the_image_speaks_to_more_than_on_average():
    # V = [1 0], [0 1], [1 1] and T = [1 0], [0 2], [-1 0], [.5 .5]: the mean share is
    # [.256874 .467953 .060876 .214298], so that the first two exceed 1/4. Row 1 has one more text
    # token in front, which does not count, and padding.
    text, visual = [[1, 0], [0, 2], [-1, 0], [0.5, 0.5]], [[1, 0], [0, 1], [1, 1]]
    hidden = [[*visual, *text, [0, 0], [0, 0]], [[9, 9], *visual, *text, [9, 9]]]
    sequence = rows([[0] * 3 + [-1] * 6, [-1] + [0] * 3 + [-1] * 5], hidden, [7, 8])
    for count in (6, 9):
        raters = run_raters(sequence.hidden, sequence, count)
        np.testing.assert_array_equal(np.flatnonzero(raters[0]), [3, 4])
        np.testing.assert_array_equal(np.flatnonzero(raters[1]), [4, 5])


def test_rows_without_an_image_or_without_text_behind_it_have_no_raters():
    hidden = np.random.default_rng(0).standard_normal((2, 6, 2))
    sequence = rows([[-1] * 6, [-1, -1, 0, 0, 0, 0]], hidden)
    raters = run_raters(sequence.hidden, sequence, 4)
    assert not raters.any()
    score = rater_mean(jnp.ones((2, 4, 6)), sequence._replace(note=raters))
    np.testing.assert_array_equal(score, 0)


def test_the_raters_mean_attention_decides():
    # [.15 .2 .05 .1 .15] for five visual tokens: 1 and, of the two that tie, 0 are kept.
    attention = np.zeros((1, 3, 8), np.float32)
    attention[0, 0, :5] = 0.1, 0.3, 0.05, 0.05, 0.2
    attention[0, 1, :5] = 0.2, 0.1, 0.05, 0.15, 0.1
    attention[0, 2, :5] = 9
    sequence = rows([[0] * 5 + [-1] * 3])._replace(note=jnp.array([[0, 0, 0, 0, 0, 1, 1, 0.0]]))
    score = rater_mean(jnp.asarray(attention), sequence)
    np.testing.assert_allclose(score[0, :5], [0.15, 0.2, 0.05, 0.1, 0.15], atol=1e-7)
    kept = keep_best(score, sequence.image, jnp.array([[2]]))
    np.testing.assert_array_equal(np.flatnonzero(kept[0]), [0, 1, 5, 6, 7])


LINE = [0, 0.3, 0.7, 4, 4.9, 10, 10.5, 12]


def test_clusters_worked_by_hand():
    # Density [.824207 .920044 .805198 .020242 .002133 .242521 .434598 .124514] times distance
    # [.3 12 .4 3.3 .9 .5 9.8 1.5]: the centres are 1, 6 and 2.
    for padding in (0, 4):
        x = jnp.pad(jnp.asarray(LINE)[:, None], ((0, padding), (0, 0)), constant_values=0.31)
        merged, centre = run_clusters(x, 8, 3, most=3 + padding // 2)
        np.testing.assert_array_equal(centre[:3], [1, 6, 2])
        expected = [0.149999925, 10.833329722, 3.199998933]
        np.testing.assert_allclose(merged[:3, 0], expected, rtol=1e-6)


def test_two_densest_tokens_that_tie_are_both_centres_unless_there_is_noise():
    x = jnp.asarray([0, 0.3, 0.7, 4, 4.9, 10])[:, None]
    merged, centre = run_clusters(x, 6, 2, most=2)
    np.testing.assert_array_equal(centre, [0, 1])
    np.testing.assert_allclose(merged[:, 0], [0, 19.9 / 5], rtol=1e-5)
    _, centre = run_clusters(x, 6, 2, most=2, noise=1e-6)
    assert sorted(centre.tolist())[0] in (0, 1) and sorted(centre.tolist())[1] not in (0, 1)


def plain_recycled(score, x, slots, count):
    """One image in float64 loops: slots that are kept, the clusters, and their centres' slots."""
    best = sorted(slots, key=lambda i: (-score[i], i))
    kept, gone = sorted(best[:count]), best[count:]
    if not gone:
        return kept, [], []
    gone = gone[: int(len(gone) * 0.3) + 1]
    c = int(len(gone) / 10) + 1
    distance = {
        (i, j): np.sqrt(((x[i] - x[j]) ** 2).sum()) / np.sqrt(x.shape[1])
        for i in gone
        for j in gone
    }
    density = {
        i: np.exp(-np.mean([d**2 for d in sorted(distance[i, j] for j in gone)[:c]])) for i in gone
    }
    far = max(distance.values())
    peak = {
        i: density[i] * min([distance[i, j] for j in gone if density[j] > density[i]], default=far)
        for i in gone
    }
    centres = sorted(gone, key=lambda i: (-peak[i], gone.index(i)))[:c]
    members = {i: [i] for i in centres}
    for i in gone:
        if i not in centres:
            members[min(centres, key=lambda j: (distance[i, j], centres.index(j)))].append(i)
    return kept, [x[own].sum(0) / (len(own) + 1e-6) for own in members.values()], centres


def test_clusters_stand_behind_their_image():
    """Two images in a row, of which one loses many tokens, one few or none; and padding."""
    random = np.random.default_rng(0)
    image = [-1, *[0] * 50, -1, *[1] * 9, -1, -1, -1]
    run = jax.jit(functools.partial(recycle, noise=0.0))
    for count in ([4, 6], [49, 9], [0, 8]):
        x = random.standard_normal((1, len(image), 3)).astype(np.float32)
        score = random.permutation(len(image))[None] / 64
        sequence = rows([image], x, [len(image) - 1])
        sequence = sequence._replace(note=jnp.asarray(score, jnp.float32))
        after, left = run(sequence, jnp.asarray(score, jnp.float32), jnp.array([count]))
        expected, places = [], []
        for start, number in ((0, 0), (51, 1)):
            expected.append(x[0, start]), places.append(start)
            slots = [i for i, of in enumerate(image) if of == number]
            kept, clusters, centres = plain_recycled(score[0], x[0], slots, count[number])
            expected += [*x[0, kept], *clusters]
            places += [*kept, *(-1 - centre for centre in centres)]
        expected += [*x[0, 61:63]]
        places = np.array([*places, 61, 62])
        np.testing.assert_array_equal(np.flatnonzero(left[0]), np.arange(len(places)))
        np.testing.assert_allclose(after.hidden[0, : len(places)], expected, atol=1e-5)
        merged = places < 0
        np.testing.assert_array_equal(
            after.position[0, 0, : len(places)], np.where(merged, -1 - places, places)
        )
        at = np.where(merged, -1 - places, places)
        np.testing.assert_array_equal(after.image[0, : len(places)], np.array(image)[at])
        index = np.where(merged | (np.array(image)[at] < 0), -1, places)
        np.testing.assert_array_equal(after.index[0, : len(places)], index)
        np.testing.assert_allclose(
            after.note[0, : len(places)], np.where(merged, 0, score[0, at]), rtol=1e-6
        )


def test_positions_are_divided_out():
    # With two channels a score of ones is 2 cos(difference of angles) / sqrt(2).
    angle = np.array([0, 0.4, 1.0, 2.5])
    channels = np.stack([np.cos(angle), np.sin(angle)])[:, None, :, None].repeat(2, axis=3)
    sequence = rows([[0, 0, -1, -1]])
    attention = np.random.default_rng(0).random((1, 3, 2, 4)).astype(np.float32)
    expected = attention / (2 * np.cos(angle[2:, None] - angle) / np.sqrt(2))
    result = without_positions(jnp.asarray(attention), jnp.asarray(channels, jnp.float32), sequence)
    np.testing.assert_allclose(result, expected, rtol=1e-4)
    assert (np.asarray(result) < 0).any()


def test_the_heads_that_look_at_the_image_most_vote():
    # Token 3 rates tokens 1 and 2. Heads 0 and 2 look at them most; head 1 would choose otherwise.
    attention = np.zeros((1, 3, 1, 4), np.float32)
    attention[0, :, 0] = [[0.1, 0.5, 0.3, 0.1], [0.7, 0.0, 0.2, 0.1], [0.2, 0.4, 0.3, 0.1]]
    angles = np.stack([np.ones((1, 4, 2)), np.zeros((1, 4, 2))])  # no rotation
    sequence = rows([[-1, 0, 0, -1]])._replace(note=jnp.array([[0, 0, 0, 1.0]]))
    taps = {"attention": jnp.asarray(attention), "rotary": jnp.asarray(angles, jnp.float32)}
    scores = {h: SparseVLMv2(heads=h).scores(sequence, taps)[0, 1:3] * 2**0.5 for h in (1, 2, 14)}
    np.testing.assert_allclose(scores[1], [0.5, 0.3], rtol=1e-5)
    np.testing.assert_allclose(scores[2], [0.45, 0.3], rtol=1e-5)
    np.testing.assert_allclose(scores[14], [0.3, 0.8 / 3], rtol=1e-5)


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


@pytest.fixture(scope="module")
def both(tmp_path_factory):
    """A model of 36 visual tokens, as many as it takes for two clusters."""
    folder = tmp_path_factory.mktemp("model")
    return pair(folder, text={"num_hidden_layers": 3}, vision={"image_size": 48})


@pytest.mark.parametrize(
    ("kind", "counts", "options"),
    [(SparseVLM, (4, 2), {"noise": 0.0}), (SparseVLMv2, (20, 3), {"heads": 2})],
)
def test_generation_equals_the_torch_reference(both, kind, counts, options):
    heads = options.get("heads")
    pruner = kind(pruning_loc=(0, 1), sparse_token_list=counts, **options)
    drops = {loc + 1: dropping(loc, count, heads) for loc, count in enumerate(counts)}
    for asked in traced(both, ask(3, seed=2), Method(pruner), 4):
        last = torch_stages.check(both, asked, drops, renumber=heads is None)[-1]
        merged = (last.index < 0) & (last.image >= 0)
        assert merged.any() == (heads is None and len(asked.images) > 0)
