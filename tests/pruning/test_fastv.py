from fractions import Fraction

import pytest
import torch_stages
from generation_reference import ask, traced
from views import llava

from stepprune_jax.pruning import Budget, FastV, Survivors


@pytest.mark.parametrize(
    ("layer", "budget", "exact", "kept"), [(2, 64, 29.9, 30), (3, 64, 11.0, 11)]
)
def test_a_budget_may_be_the_mean_over_the_layers(layer, budget, exact, kept):
    fastv = FastV(Budget("count", budget), layer=layer, average=True)
    fastv.check(llava(), 576)
    assert fastv.schedule(llava(), 576).after == (Survivors(kept),)
    assert (layer * 576 + (32 - layer) * exact) / 32 == pytest.approx(budget, abs=0.05)
    fastv = FastV(Budget("count", budget), layer=layer)
    assert fastv.layer_tokens(llava(), 576) == [576] * layer + [budget] * (32 - layer)


def test_a_mean_of_all_tokens_or_of_one_of_a_small_image():
    fastv = FastV(Budget("count", 576), average=True)
    fastv.check(llava(), 576)
    assert fastv.schedule(llava(), 576).after == (Survivors(576),)
    # A mean of 1 of 14 tokens, of which the first layers see all.
    fastv = FastV(Budget("rate", Fraction(1, 14)), average=True)
    fastv.check(llava(), 576)
    assert fastv.schedule(llava(), 14).after == (Survivors(1),)


def test_generation_equals_the_torch_reference(deep_pair):
    layer, count, questions = 2, 4, ask(3, seed=1)
    assert [len(images) for images in questions[1]] == [2, 0, 1]

    def drop(core, entered):
        last = torch_stages.attention(core, layer - 1, entered[layer - 1], [-1])
        counts = [count] * (entered[-1].image.max() + 1)
        return torch_stages.keeping_best(last[:, 0].mean(0), entered[-1], counts)

    method = FastV(Budget("count", count), layer)
    for example in traced(deep_pair, questions, method, 5):
        torch_stages.check(deep_pair, example, {layer: drop})
