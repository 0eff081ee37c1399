import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch_stages
from generation_reference import ask, pair, traced
from views import llava, rows

from stepprune_jax.models.attention import Tap
from stepprune_jax.pruning import Budget, LayerCut, Method, TopV
from stepprune_jax.pruning.ordering import evenly
from stepprune_jax.pruning.topv import contributions


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


COST = [[0, 1, 0.5], [1, 0, 0.2], [0.5, 0.2, 0]]


def test_a_transport_worked_by_hand():
    masses = np.full(3, 1 / 3), np.array([0.2, 0.3, 0.5])
    arrays = (jnp.asarray(x, jnp.float32)[None] for x in (COST, *masses))
    given = contributions(*arrays, jnp.ones((1, 3, 3), bool), 0.5, 3)[0]
    np.testing.assert_allclose(given, [0.32996, 0.335671, 0.33437], atol=1e-6)
    np.testing.assert_allclose(given, transported(COST, *masses, 0.5, 3), atol=1e-6)
    # With the rows scaled last it would say nothing: each would be a third.
    assert np.ptp(given) > 0.005


def test_evenly_among_those_that_may_be_picked():
    pool = jnp.array([[1, 0, 1, 1, 1, 0, 1, 1], [0, 0, 1, 0, 0, 0, 0, 1]], bool)
    spread = jax.jit(evenly)
    picked = spread(pool, jnp.array([4, 2]))
    # Of six, those at 0, 1, 3 and 4.
    np.testing.assert_array_equal(picked[0], [1, 0, 1, 0, 1, 0, 1, 0])
    np.testing.assert_array_equal(picked[1], pool[1])
    for m in (1, 7):
        for g, row in enumerate(spread(jnp.ones((m + 1, m), bool), jnp.arange(m + 1))):
            assert np.flatnonzero(row).tolist() == [i * m // g for i in range(g)]


def plain(source, target, grid, count, topv):
    """Indices of one image's tokens that stay, in float64 loops."""
    n, (height, width) = len(source), grid
    place = np.array([divmod(i, width) for i in range(n)], float)
    middle = np.array([(height - 1) / 2, (width - 1) / 2])
    feature, spatial, central = np.zeros((3, n, n))
    for i in range(n):
        for j in range(n):
            feature[i, j] = np.sqrt(((source[i] - target[j]) ** 2).sum())
            spatial[i, j] = 1 - np.exp(-((place[i] - place[j]) ** 2).sum() / (2 * topv.sigma**2))
            central[i, j] = np.sqrt(((place[i] - middle) ** 2).sum())
    terms = [(x - x.min()) / (x.max() - x.min() or 1) for x in (feature, spatial, central)]
    cost = topv.alpha * terms[0] + topv.beta * terms[1] + topv.gamma * terms[2]
    masses = [np.linalg.norm(x, axis=1) for x in (source, target)]
    masses = [mass / mass.sum() for mass in masses]
    importance = transported(cost, *masses, topv.epsilon, topv.iterations)
    recovered = count // topv.recover_every if topv.recover_every else 0
    kept = set(torch_stages.best(importance, count - recovered).tolist())
    left = [i for i in range(n) if i not in kept]
    kept |= {left[i * len(left) // recovered] for i in range(recovered)}
    return sorted(kept)


@pytest.mark.parametrize(
    "topv", [TopV(), TopV(beta=0.0, gamma=0.5, recover_every=0), TopV(sigma=1.0, iterations=1)]
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
    assert cut == LayerCut(3, (Tap("hidden", 2), Tap("mlp_input", 2)))
    taps = {"hidden.2": jnp.asarray(hidden[0]), "mlp_input.2": jnp.asarray(hidden[1])}
    drop = jax.jit(lambda taps, count: topv.drop((), cut, sequence, taps, count)[1])
    for counts in ((5, 4), (12, 0), (8, 10)):
        keep = drop(taps, jnp.broadcast_to(jnp.array(counts), (b, 2)))
        for row in range(b):
            assert keep[row][image < 0].all()
            for at, count in enumerate(counts):
                own = image == at
                expected = plain(*(x[row][own] for x in hidden), grids[at], count, topv)
                assert np.flatnonzero(keep[row][own]).tolist() == expected


def test_terms_run_from_0_to_1_and_nothing_becomes_nan():
    image = jnp.array([[-1, *[0] * 4, -1, 1]], jnp.int32)
    index = jnp.array([[-1, 0, 1, 2, 3, -1, 0]], jnp.int32)
    sequence = rows(image, index=index, grid=jnp.array([[[2, 2], [1, 1]]]))
    same = (image[:, None] == image[..., None]) & (image >= 0)[:, None]
    random = np.random.default_rng(0)
    for features in (random.standard_normal((2, 1, 7, 2)), np.zeros((2, 1, 7, 2))):
        source, target = jnp.asarray(features, jnp.float32)
        for weights in ((1.0, 0.0, 0.0), (0.0, 1.0, 0.0), (0.0, 0.0, 1.0)):
            cost = jax.jit(TopV(Budget(), 2, *weights).cost)(source, target, sequence, same)
            assert np.isfinite(cost).all()
            own = np.asarray(cost)[0, 1:5, 1:5]
            assert own.min() == 0 and own.max() in (0, 1)
        taps = {"hidden.2": source, "mlp_input.2": target}
        (cut,) = TopV().cuts(llava(), 4)
        drop = jax.jit(functools.partial(TopV().drop, (), cut))
        _, keep = drop(sequence, taps, jnp.array([[2, 1]]))
        assert keep[0, 1:5].sum() == 2 and keep[0, 6]


def test_generation_equals_the_torch_reference(tmp_path):
    both = pair(tmp_path, text={"num_hidden_layers": 4}, vision={"image_size": 40})
    topv = TopV(Budget("count", 9), layer=1, beta=0.3)

    def drop(core, entered):
        row, block = entered[1], core.layers[1]
        angles = core.rotary_emb(row.hidden, row.position)
        attended, _ = block.self_attn(block.input_layernorm(row.hidden), angles, None)
        target = block.post_attention_layernorm(row.hidden + attended)
        states = [x[0].double().numpy() for x in (row.hidden, target)]
        spans = [row.span(image) for image in range(row.image.max() + 1)]
        return entered[-1].dropping(
            [span[plain(*(x[span] for x in states), (5, 5), 9, topv)] for span in spans]
        )

    for asked in traced(both, ask(3, seed=5), Method(topv), 4):
        torch_stages.check(both, asked, {2: drop})
