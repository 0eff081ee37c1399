from fractions import Fraction

import jax.numpy as jnp
import numpy as np
import pytest
import torch_stages
from generation_reference import ask, pair, traced
from views import llava, rows

from stepprune_jax.models.attention import Tap
from stepprune_jax.pruning import Budget, FastV, LayerCut, Method, Survivors

HEADS = [
    [0.04, 0.1, 0.3, 0.04, 0.22, 0.1, 0.1, 0.1],
    [0.06, 0.2, 0.12, 0.16, 0.1, 0.16, 0.1, 0.1],
]


def test_the_last_tokens_mean_attention_decides():
    # Token 0 and the last two are text. The mean over heads is
    # [.05 .15 .21 .1 .16 .13 .1 .1], so tokens 2 and 4 are the best two of 1 to 5.
    fastv = FastV(Budget("count", 2))
    (cut,) = fastv.cuts(llava(), 9)
    assert cut == LayerCut(2, (Tap("attention", 1),), "last")
    taps, image = {"attention.1": jnp.asarray(HEADS)[None, :, None]}, [[-1, *[0] * 5, -1, -1]]
    _, keep = fastv.drop((), cut, rows(image), taps, jnp.array([[2]]))
    np.testing.assert_array_equal(np.flatnonzero(keep[0]), [0, 2, 4, 6, 7])


@pytest.mark.parametrize(
    ("layer", "budget", "exact", "kept"),
    [(2, 192, 166.4, 166), (2, 128, 98.1, 98), (2, 64, 29.9, 30), (3, 64, 11.0, 11)],
)
def test_a_budget_may_be_the_mean_over_the_layers(layer, budget, exact, kept):
    fastv = FastV(Budget("count", budget), layer=layer, average=True)
    fastv.check(llava(), 576)
    assert fastv.survivors(llava(), 576) == (Survivors(kept),)
    assert (layer * 576 + (32 - layer) * exact) / 32 == pytest.approx(budget, abs=0.05)
    fastv = FastV(Budget("count", budget), layer=layer)
    assert fastv.survivors(llava(), 576) == (Survivors(budget),)
    assert fastv.layer_tokens(llava(), 576) == [576] * layer + [budget] * (32 - layer)


def test_a_budget_of_all_tokens_is_one_in_both_ways_to_count():
    for average in (False, True):
        for budget in (Budget(), Budget("count", 576), Budget("rate", Fraction(1))):
            fastv = FastV(budget, average=average)
            fastv.check(llava(), 576)
            assert fastv.survivors(llava(), 576) == (Survivors(576),)
    # A mean of 1 of 14 tokens, of which the first layers see all.
    fastv = FastV(Budget("rate", Fraction(1, 14)), average=True)
    fastv.check(llava(), 576)
    assert fastv.survivors(llava(), 14) == (Survivors(1),)


@pytest.fixture(scope="module")
def both(tmp_path_factory):
    return pair(tmp_path_factory.mktemp("model"), text={"num_hidden_layers": 4})


@pytest.mark.parametrize(("layer", "count"), [(1, 4), pytest.param(3, 2, marks=pytest.mark.slow)])
def test_generation_equals_the_torch_reference(both, layer, count):
    questions = ask(3, seed=layer)
    assert [len(images) for images in questions[1]] == [2, 0, 1]

    def drop(core, entered):
        last = torch_stages.attention(core, layer - 1, entered[layer - 1], [-1])
        counts = [count] * (entered[-1].image.max() + 1)
        return torch_stages.keeping_best(last[:, 0].mean(0), entered[-1], counts)

    method = Method(FastV(Budget("count", count), layer))
    for asked in traced(both, questions, method, 5):
        torch_stages.check(both, asked, {layer: drop})
