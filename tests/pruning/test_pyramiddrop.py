import numpy as np
import pytest
import torch_stages
from generation_reference import ask, traced
from views import llava

from stepprune_jax.pruning import Budget, PyramidDrop
from stepprune_jax.pruning.schedule import geometric_counts
from stepprune_jax.registry import build_pruner

LLAVA = llava(side=192)  # of 576 visual tokens


def kept(pruner, layers=32):
    return [left.kept for left in pruner.schedule(llava(layers, 192), 576).after]


def mean_tokens(pruner):
    return np.mean(pruner.layer_tokens(LLAVA, 576))


def test_the_authors_schedule():
    pruner = build_pruner("pyramiddrop", options={"image_token_ratio_list": "[0.5, 0.25, 0.125]"})
    pruner.check(LLAVA, 576)
    assert kept(pruner) == [288, 144, 72]
    assert mean_tokens(pruner) == 270


def test_shares_are_rounded_down():
    pruner = PyramidDrop(layer_list=(2, 10, 20), image_token_ratio_list=(0.32, 0.16, 0.08))
    assert kept(pruner) == [184, 92, 46]
    assert mean_tokens(pruner) == 128
    # As the authors' program rounds it: 100 * .29 is a little less than 29.
    fewer = PyramidDrop(layer_list=(2,), image_token_ratio_list=(0.29,))
    assert fewer.schedule(LLAVA, 100).after[0].kept == 28
    # Down to none.
    none = PyramidDrop(layer_list=(2, 3), image_token_ratio_list=(0.25, 0.1))
    assert kept(none) == [144, 57] and none.schedule(LLAVA, 9).after[1].kept == 0


@pytest.mark.parametrize("budget", [400, 192, 128, 58])
def test_one_ratio_meets_a_mean_over_layers(budget):
    pruner = PyramidDrop(Budget("count", budget))
    pruner.check(LLAVA, 576)
    counts = [576, *kept(pruner)]
    assert counts == sorted(counts, reverse=True)
    # Rounding down takes less than one token of each stage.
    assert budget - 1 < mean_tokens(pruner) <= budget


def test_the_ratio_of_the_published_layers_at_192_tokens():
    widths = [8, 8, 8, 8]
    assert geometric_counts(576, 192, widths, average=True) == (145, 36, 9)
    assert geometric_counts(576, 72, widths, average=False) == (288, 144, 72)
    for n in range(1, 2000):
        assert geometric_counts(n, n, widths, average=False) == (n, n, n)


def test_layers_are_chosen_by_depth_and_budget():
    def layers(depth, budget, **fields):
        pruner = PyramidDrop(Budget("count", budget), **fields)
        return [cut.layer for cut in pruner.cuts(llava(depth, 192), 576)]

    assert layers(32, 192) == layers(40, 192) == [8, 16, 24]
    assert layers(32, 150) == layers(32, 128) == [2, 10, 20]
    assert layers(32, 128, average=False) == [8, 16, 24]
    assert layers(4, 192) == [1, 2, 3]
    assert layers(4, 64) == [1, 2]


def test_generation_equals_the_torch_reference(deep_pair):
    ratios = {1: 0.7, 2: 0.3}
    pruner = PyramidDrop(layer_list=(*ratios,), image_token_ratio_list=(*ratios.values(),))

    def dropping(layer):
        def drop(core, entered):
            last = torch_stages.attention(core, layer, entered[-1], [-1])
            counts = [int(36 * ratios[layer])] * (entered[-1].image.max() + 1)
            return torch_stages.keeping_best(last[:, 0].mean(0), entered[-1], counts)

        return drop

    drops = {layer: dropping(layer) for layer in ratios}
    for example in traced(deep_pair, ask(3, seed=1), pruner, 5):
        rows = torch_stages.check(deep_pair, example, drops, renumber=True)
        assert {(row.image == 0).sum() for row in rows} >= ({36, 25, 10} if example.images else {0})
