import dataclasses
import random

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
import torch_stages
from generation_reference import ask, pair, traced
from views import llava, rows

from stepprune_jax.models.attention import Tap
from stepprune_jax.pruning import Budget, Dart, LayerCut, Method, Survivors
from stepprune_jax.pruning.dart import set_order


def kept(pruner, size, features, image, count):
    """Slots that stay of one row, given the sizes of keys [s] and features [s, 2]."""
    # Two heads, the norm in one of them and a minus in front: it is the L1 norm over both.
    keys = jnp.stack([jnp.asarray(size, jnp.float32), jnp.zeros(len(image))], axis=0)
    (cut,) = pruner.cuts(llava(), 9)
    taps = {"keys.1": -keys[None, ..., None], "normed.2": jnp.asarray([features], jnp.float32)}
    assert [f"{tap.kind}.{tap.layer}" for tap in cut.taps] == list(taps)
    drop = jax.jit(pruner.drop, static_argnums=1)
    _, keep = drop((), cut, rows([image]), taps, jnp.asarray([count], jnp.int32))
    return np.flatnonzero(keep[0]).tolist()


# Slot 0 is text, 1 to 6 an image, 7 to 9 words.
IMAGE = [-1, 0, 0, 0, 0, 0, 0, -1, -1, -1]
SIZE = [99, 3, 9, 4, 2, 5, 1, 7, 2, 6]
FEATURES = [
    [0, 0],
    [1, 0],
    [1, 1],
    [0, 1],
    [-1, 0.2],
    [-0.5, -1],
    [2, 0.5],
    [0, -1],
    [1, 0],
    [0.3, 0.9],
]


@pytest.mark.parametrize("order", ["set", "norm"])
def test_a_row_worked_by_hand(order):
    # The pivots are 2 and 7. Cosines of 1, 3, 4, 5, 6 with 2: .707 .707 -.555 -.949 .857, so it
    # takes 5; of 1, 3, 4, 6 with 7: 0 -1 -.196 -.243, so it takes 3.
    dart = Dart(pivot_image_token=1, pivot_text_token=1, pivot_order=order)
    assert kept(dart, SIZE, FEATURES, IMAGE, [3]) == [0, 2, 3, 5, 7, 8, 9]
    # With two each, 2 takes 5 and 4, 7 takes 3 and 6, and 1 is left over.
    assert kept(dart, SIZE, FEATURES, IMAGE, [5]) == [0, 2, 3, 4, 5, 6, 7, 8, 9]
    # Scaling a feature changes no cosine.
    scaled = np.array(FEATURES) * np.arange(1, 11)[:, None]
    assert kept(dart, SIZE, scaled, IMAGE, [3]) == [0, 2, 3, 5, 7, 8, 9]


def test_the_order_of_the_pivots_decides():
    # The pivots are 1 and 8, of which 1 has the larger key; a set of them begins with 8.
    image, size = [-1, *[0] * 8], [0, 2, 0, 0, 0, 0, 0, 0, 1]
    features = [[0, 0], [1, 0], [-1, -1], [-0.5, 1], [1, -0.2], [1, 1], [1, 1], [1, 1], [0, 1]]
    dart = Dart(pivot_image_token=2, pivot_text_token=0)
    # Both want 2 most (-.707). If 1 has it, 8 takes 4 (-.196); if 8 has it, 1 takes 3 (-.447).
    by_norm = dataclasses.replace(dart, pivot_order="norm")
    assert kept(by_norm, size, features, image, [4]) == [0, 1, 2, 4, 8]
    assert list({1, 8}) == [8, 1]
    assert kept(dart, size, features, image, [4]) == [0, 1, 2, 3, 8]


def test_ties_go_to_the_earlier_token_and_images_do_not_compete():
    image = [-1, 0, 0, 0, -1, 1, 1, 1, -1]
    size = [0, 1, 1, 1, 5, 2, 3, 3, 1]
    features = np.ones((9, 2))
    dart = Dart(pivot_image_token=1, pivot_text_token=0)
    assert kept(dart, size, features, image, [2, 2]) == [0, 1, 2, 4, 5, 6, 8]
    assert kept(dart, size, features, image, [3, 0]) == [0, 1, 2, 3, 4, 8]


def test_sets_are_iterated_as_cpython_does():
    draw, compiled = random.Random(0), jax.jit(set_order)
    for p in (1, 4, 5, 6, 7, 8, 16, 20):
        for _ in range(50):
            numbers = draw.sample(range(draw.choice([30, 700, 4000])), p)
            found = [numbers[at] for at in compiled(jnp.array(numbers)).tolist()]
            assert found == list(set(numbers))
    # As worked by hand: in a table of 32, 640 and 40 want slots 0 and 8, and 610 wants 2.
    numbers = [40, 70, 100, 610, 620, 615, 650, 640]
    found = [numbers[at] for at in compiled(jnp.array(numbers)).tolist()]
    assert found == [640, 610, 100, 70, 615, 40, 650, 620]


@pytest.mark.parametrize(
    ("dart", "n", "left"),
    [
        # The pivots of the image are not counted, and each of eight takes as many.
        (Dart(Budget("count", 192)), 576, 196),
        (Dart(Budget("count", 5)), 576, 4),
        (Dart(Budget("count", 575)), 576, 572),
        (Dart(Budget("count", 576)), 576, 576),
        (Dart(Budget("count", 3), 2, 0, 4), 36, 1),
        (Dart(Budget("count", 12), 2, 3, 2), 36, 13),
        (Dart(Budget("count", 5), 2, 50, 1), 36, 36),
        # A third of 71 is less than 24, so each of the eight takes two.
        (Dart(Budget.parse("1/3")), 71, 20),
        (Dart(Budget.parse("1%")), 71, 4),
    ],
)
def test_what_is_left(dart, n, left):
    dart.check(llava(), n)
    assert dart.cuts(llava(), n) == (LayerCut(2, (Tap("keys", 1), Tap("normed", 2))),)
    assert dart.survivors(llava(), n) == (Survivors(left),)


def least_alike(core, entered, layer, count, pivots, order):
    """The slots of each image that stay, in torch and with Python's own sets."""
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
        turns = [*own, *words]
        for pivot in list(set(turns)) if order == "set" else turns:
            likeness = torch.cosine_similarity(features[pivot], features[pool], dim=-1).numpy()
            share = (count - pivots[0]) // sum(pivots)
            taken = [pool[at] for at in torch_stages.best(-likeness, share)]
            stay += taken
            pool = [slot for slot in pool if slot not in taken]
        result.append(stay)
    return result


@pytest.fixture(scope="module")
def both(tmp_path_factory):
    sizes = {"text": {"num_hidden_layers": 4}, "vision": {"image_size": 48}}
    return pair(tmp_path_factory.mktemp("model"), **sizes)


@pytest.mark.parametrize(
    ("layer", "pivots", "order", "budget", "count"),
    [(2, (4, 4), "set", 16, 20), pytest.param(1, (2, 1), "norm", 10, 11, marks=pytest.mark.slow)],
)
def test_generation_equals_the_torch_reference(both, layer, pivots, order, budget, count):
    def drop(core, entered):
        return entered[-1].dropping(least_alike(core, entered, layer, count, pivots, order))

    pruner = Dart(Budget("count", budget), layer, *pivots, order)
    for asked in traced(both, ask(3, seed=layer), Method(pruner), 4):
        torch_stages.check(both, asked, {layer: drop})
        assert asked.answer.kept == count * len(asked.images)
