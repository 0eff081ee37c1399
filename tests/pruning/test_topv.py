import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch_stages
from generation_reference import ask, traced
from views import llava, rows

from stepprune_jax.pruning import Budget, TopV


def transported(cost, source, target, epsilon, iterations):
    """Sums of the rows of a transport whose columns were scaled last, in float64."""
    kernel = np.exp(-np.asarray(cost) / epsilon)
    columns = np.ones(len(target))
    for _ in range(iterations):
        rows = source / (kernel @ columns)
        columns = target / (kernel.T @ rows)
    plan = rows[:, None] * kernel * columns
    np.testing.assert_allclose(plan.sum(0), target)
    return plan.sum(1)


def plain(source, target, grid, count, topv):
    """Indices of one image's tokens that stay, in float64 loops."""
    n, (height, width) = len(source), grid
    place = np.array([divmod(i, width) for i in range(n)], float)
    middle = np.array([(height - 1) / 2, (width - 1) / 2])
    feature, spatial, central = np.zeros((3, n, n))
    for i, j in np.ndindex(n, n):
        feature[i, j] = np.linalg.norm(source[i] - target[j])
        spatial[i, j] = 1 - np.exp(-((place[i] - place[j]) ** 2).sum() / (2 * topv.sigma**2))
        central[i, j] = np.linalg.norm(place[i] - middle)
    terms = [(x - x.min()) / (x.max() - x.min() or 1) for x in (feature, spatial, central)]
    cost = topv.alpha * terms[0] + topv.beta * terms[1] + topv.gamma * terms[2]
    masses = [np.linalg.norm(x, axis=1) for x in (source, target)]
    masses = [mass / mass.sum() for mass in masses]
    importance = transported(cost, *masses, topv.epsilon, topv.iterations)
    recovered = count // topv.recover_every if topv.recover_every else 0
    kept = set(torch_stages.best(importance, count - recovered).tolist())
    remaining = [i for i in range(n) if i not in kept]
    kept |= {remaining[i * len(remaining) // recovered] for i in range(recovered)}
    return sorted(kept)


@pytest.mark.parametrize(
    "topv", [TopV(), TopV(gamma=0.5, sigma=1.0, iterations=1, recover_every=0)]
)
def test_many_rows_equal_a_plain_loop(topv):
    random, grids = np.random.default_rng(0), [(3, 4), (2, 5)]
    image = np.array([-1, -1, *[0] * 12, -1, *[1] * 10, -1, -1, -1])
    index = np.array([-1, -1, *range(12), -1, *range(10), -1, -1, -1])
    b, s = 4, len(image)
    hidden = [random.standard_normal((b, s, 6)).astype(np.float32) for _ in range(2)]
    shapes = jnp.broadcast_to(jnp.array(grids), (b, 2, 2))
    sequence = rows([image] * b, np.zeros((b, s, 6)), index=[index] * b, grid=shapes)
    (cut,) = topv.cuts(llava(), 12)
    taps = {"hidden.2": jnp.asarray(hidden[0]), "mlp_input.2": jnp.asarray(hidden[1])}
    drop = jax.jit(lambda taps, count: topv.drop(cut, sequence, taps, count)[1])
    for counts in ((5, 4), (12, 0), (8, 10)):
        keep = drop(taps, jnp.broadcast_to(jnp.array(counts), (b, 2)))
        for row in range(b):
            assert keep[row][image < 0].all()
            for at, count in enumerate(counts):
                own = image == at
                expected = plain(*(x[row][own] for x in hidden), grids[at], count, topv)
                assert np.flatnonzero(keep[row][own]).tolist() == expected


def test_features_that_are_all_alike_become_no_nan():
    index, grid = [[-1, 0, 1, 2, 3, -1, 0]], jnp.array([[[2, 2], [1, 1]]])
    sequence, similar = rows([[-1, *[0] * 4, -1, 1]], index=index, grid=grid), jnp.zeros((1, 7, 2))
    (cut,) = TopV().cuts(llava(), 4)
    drop = jax.jit(functools.partial(TopV().drop, cut))
    taps = {"hidden.2": similar, "mlp_input.2": similar}
    _, keep = drop(sequence, taps, jnp.array([[2, 1]]))
    assert keep[0, 1:5].sum() == 2 and keep[0, 6]


def test_generation_equals_the_torch_reference(deep_pair):
    topv = TopV(Budget("count", 9), layer=1, beta=0.3)

    def drop(core, entered):
        row, block = entered[1], core.layers[1]
        angles = core.rotary_emb(row.hidden, row.position)
        attended, _ = block.self_attn(block.input_layernorm(row.hidden), angles, None)
        target = block.post_attention_layernorm(row.hidden + attended)
        states = [x[0].double().numpy() for x in (row.hidden, target)]
        spans = [row.span(image) for image in range(row.image.max() + 1)]
        return entered[-1].dropping(
            [span[plain(*(x[span] for x in states), (6, 6), 9, topv)] for span in spans]
        )

    for example in traced(deep_pair, ask(3, seed=5), topv, 4):
        torch_stages.check(deep_pair, example, {2: drop})
