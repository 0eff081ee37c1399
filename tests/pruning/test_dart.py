import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
import torch_stages
from generation_reference import ask, traced
from views import llava, rows

from stepprune_jax.pruning import Budget, Dart, Survivors


def kept(pruner, size, features, image, count):
    """Slots that stay of one row, given the sizes of keys [s] and features [s, 2]."""
    # Two heads, the norm in one of them and a minus in front: it is the L1 norm over both.
    keys = jnp.stack([jnp.asarray(size, jnp.float32), jnp.zeros(len(image))], axis=0)
    (cut,) = pruner.cuts(llava(), 9)
    taps = {"keys.1": -keys[None, ..., None], "normed.2": jnp.asarray([features], jnp.float32)}
    drop = jax.jit(pruner.drop, static_argnums=0)
    _, keep = drop(cut, rows([image]), taps, jnp.asarray([count], jnp.int32))
    return np.flatnonzero(keep[0]).tolist()


def test_the_pivot_with_the_largest_keys_takes_first():
    # The pivots are 1 and 8, of which 1 has the larger key.
    image, size = [-1, *[0] * 8], [0, 2, 0, 0, 0, 0, 0, 0, 1]
    features = [[0, 0], [1, 0], [-1, -1], [-0.5, 1], [1, -0.2], [1, 1], [1, 1], [1, 1], [0, 1]]
    dart = Dart(pivot_image_token=2, pivot_text_token=0)
    # Both want 2 most (-.707). If 1 has it, 8 takes 4 (-.196); if 8 has it, 1 takes 3 (-.447).
    assert kept(dart, size, features, image, [4]) == [0, 1, 2, 4, 8]
    # With the larger key at 8, as the authors' set {1, 8} begins, too.
    size[8] = 3
    assert kept(dart, size, features, image, [4]) == [0, 1, 2, 3, 8]


def test_pivots_of_the_image_take_before_words():
    # The word 5 has a larger key than the pivot 1, and wants 2 most, as 1 does (-.707).
    image, size = [-1, 0, 0, 0, 0, -1], [0, 1, 0, 0, 0, 2]
    features = [[0, 0], [1, 0], [-1, -1], [-0.5, 1], [1, -0.2], [0, 1]]
    dart = Dart(pivot_image_token=1, pivot_text_token=1)
    assert kept(dart, size, features, image, [3]) == [0, 1, 2, 4, 5]


@pytest.mark.parametrize(
    ("dart", "n", "left"),
    [
        # The pivots of the image are not counted, and each of eight takes as many.
        (Dart(Budget("count", 192)), 576, 196),
        (Dart(Budget("count", 5)), 576, 4),
        (Dart(Budget("count", 576)), 576, 576),
        (Dart(Budget("count", 12), 2, 3, 2), 36, 13),
        (Dart(Budget("count", 5), 2, 50, 1), 36, 36),
        # A third of 71 is less than 24, so each of the eight takes two.
        (Dart(Budget.parse("1/3")), 71, 20),
    ],
)
def test_what_is_left(dart, n, left):
    dart.check(llava(), n)
    assert dart.schedule(llava(), n).after == (Survivors(left),)


def least_alike(core, entered, layer, count, pivots):
    """The slots of each image that stay, in torch, with the pivots in our order."""
    _, key = torch_stages.queries_and_keys(core, layer - 1, entered[layer - 1])
    row, size = entered[layer], key.abs().sum((0, 2)).numpy()
    features, result = core.norm(row.hidden)[0], []
    for image in range(row.image.max() + 1):
        span = row.span(image)
        behind = np.flatnonzero((row.image < 0) & (np.arange(len(size)) > span[-1]))
        own, words = (
            slots[torch_stages.best(size[slots], number)].tolist()
            for slots, number in zip((span, behind), pivots, strict=True)
        )
        pool, stay = [slot for slot in span.tolist() if slot not in own], list(own)
        for pivot in [*own, *words]:
            likeness = torch.cosine_similarity(features[pivot], features[pool], dim=-1).numpy()
            share = (count - pivots[0]) // sum(pivots)
            stay += [pool[at] for at in torch_stages.best(-likeness, share)]
            pool = [slot for slot in pool if slot not in stay]
        result.append(stay)
    return result


def test_generation_equals_the_torch_reference(deep_pair):
    def drop(core, entered):
        return entered[-1].dropping(least_alike(core, entered, 2, 20, (4, 4)))

    pruner = Dart(Budget("count", 16), 2, 4, 4)
    for example in traced(deep_pair, ask(3, seed=2), pruner, 4):
        torch_stages.check(deep_pair, example, {2: drop})
        assert example.answer.kept == 20 * len(example.images)
