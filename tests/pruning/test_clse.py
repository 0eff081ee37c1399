import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch_stages
from generation_reference import ask, traced
from views import llava, rows

from stepprune_jax.pruning import Budget, Clse
from stepprune_jax.user_input import UserError

LLAVA = llava(side=192)  # of 576 visual tokens


def detail(states, grid, cutoff):
    """Mean of what a high-pass filter leaves of each token, by a Fourier transform."""
    h, w = grid
    spectrum = np.fft.fft2(states.reshape(h, w, -1).astype(np.float64), axes=(0, 1))
    k, l = (np.fft.fftfreq(side, 1 / side) for side in grid)
    sigma = cutoff * min(h // 2, w // 2)
    passed = 1 - np.exp(-(k[:, None] ** 2 + l**2) / (2 * sigma**2))
    return np.abs(np.fft.ifft2(spectrum * passed[..., None], axes=(0, 1))).mean(2).reshape(-1)


def factor(before, after, grid, clse):
    """The evolution of one image's tokens, in float64."""
    old, new = (detail(x, grid, clse.cutoff) for x in (before, after))
    change = np.minimum(np.abs(new - old) / (old.mean() + old + 1e-6), 1)
    standard = (change - change.mean()) / (change.std(ddof=1) + 1e-6)
    return 1 / (1 + np.exp(-standard / clse.temperature))


def kept(pruner, num_tokens=576, model=LLAVA):
    pruner.check(model, num_tokens)
    return [remaining.kept for remaining in pruner.schedule(model, num_tokens).after]


def test_the_authors_counts_at_their_budgets():
    assert kept(Clse(192)) == [330, 210, 62]
    assert kept(Clse(128)) == [220, 140, 41]
    assert kept(Clse(64)) == [110, 70, 20]
    for budget in (300, 192, 100, 30):
        first, *others = Clse(budget).layer_tokens(LLAVA, 576)
        # Layer 0 counts as one of the last, as the authors count.
        assert first == 576 and budget - 1 < np.mean([*others, others[-1]]) <= budget


def test_other_budgets_and_depths():
    assert kept(Clse(62, average=False)) == [333, 211, 62]  # 62 x 1.72 / .32, rounded down
    deep = llava(40, 192)
    tokens = Clse(128).layer_tokens(deep, 576)
    assert 127 < (sum(tokens) - tokens[0] + tokens[-1]) / 40 <= 128
    with pytest.raises(UserError, match="clse: budget is 400, expected a smaller mean over layers"):
        Clse(400).check(LLAVA, 576)
    with pytest.raises(UserError, match="layer_list"):
        Clse(64, layer_list=(1, 2, 3, 4)).check(LLAVA, 576)


def test_scores_equal_those_by_a_fourier_transform():
    random, grids = np.random.default_rng(0), [(6, 8), (5, 7)]
    image = np.array([-1, *[0] * 48, -1, *[1] * 35, -1, -1])
    index = np.array([-1, *range(48), -1, *range(35), -1, -1])
    b, s, clse = 2, len(image), Clse(cutoff=0.4)
    before, after = (random.standard_normal((b, s, 6)).astype(np.float32) for _ in range(2))
    attention = random.uniform(size=(b, 3, 1, s)).astype(np.float32)
    shapes = jnp.broadcast_to(jnp.array(grids), (b, 2, 2))
    sequence = rows([image] * b, after, index=[index] * b, grid=shapes)
    taps = {"attention.0": jnp.asarray(attention), "hidden.0": jnp.asarray(before)}
    scores = jax.jit(clse.scores)(sequence, taps)
    for row in range(b):
        for at, grid in enumerate(grids):
            own = image == at
            expected = factor(before[row, own], after[row, own], grid, clse)
            expected *= attention[row, :, 0, own].mean(1)
            np.testing.assert_allclose(scores[row, own], expected, rtol=1e-3, atol=1e-6)
    later = clse.scores(sequence, {"attention.10": taps["attention.0"]})
    np.testing.assert_allclose(later, attention[:, :, 0].mean(1), rtol=1e-6)


def test_tokens_that_do_not_change_become_no_nan():
    index, grid = [[-1, 0, 1, 2, 3, -1, 0]], jnp.array([[[2, 2], [1, 1]]])
    sequence, similar = rows([[-1, *[0] * 4, -1, 1]], index=index, grid=grid), jnp.zeros((1, 7, 2))
    sequence = sequence._replace(hidden=similar)
    taps = {"attention.0": jnp.ones((1, 2, 1, 7)), "hidden.0": similar}
    scores = Clse().scores(sequence, taps)
    assert np.isfinite(scores).all() and (scores[0, 1:5] == scores[0, 1]).all()


def test_generation_equals_the_torch_reference(deep_pair):
    clse = Clse(Budget("count", 9), layer_list=(1, 2), average=False)
    counts = [remaining.kept for remaining in clse.schedule(deep_pair.ours.config, 36).after]
    assert counts == [30, 9]

    def dropping(layer, count):
        def drop(core, entered):
            row = entered[-1]
            score = torch_stages.attention(core, layer - 1, entered[-2], [-1])[:, 0].mean(0)
            for image in range(row.image.max() + 1) if layer == 1 else ():
                span = row.span(image)
                before, after = (x.hidden[0, span].numpy() for x in (entered[0], row))
                score[span] *= factor(before, after, (6, 6), clse)
            return torch_stages.keeping_best(score, row, [count] * (row.image.max() + 1))

        return drop

    drops = {layer: dropping(layer, count) for layer, count in zip((1, 2), counts, strict=True)}
    for example in traced(deep_pair, ask(3, seed=1), clse, 5):
        torch_stages.check(deep_pair, example, drops, prunes_cache=True)
