from fractions import Fraction

import jax.numpy as jnp
import numpy as np
import pytest
import torch_stages
from generation_reference import ask, pair

from stepprune_jax.inference import generate, trace_arrays
from stepprune_jax.models.layers import Tap
from stepprune_jax.models.llava.config import LlavaConfig
from stepprune_jax.models.vlm import Sequence
from stepprune_jax.pruning import Budget, FastV, LayerCut, Survivors
from stepprune_jax.pruning.base import keep_best
from stepprune_jax.testing import tiny_hf_config

IMAGE = [[-1, 0, 0, 0, 0, 0, -1, -1]]
HEADS = [
    [0.04, 0.1, 0.3, 0.04, 0.22, 0.1, 0.1, 0.1],
    [0.06, 0.2, 0.12, 0.16, 0.1, 0.16, 0.1, 0.1],
]


def rows(image):
    """Rows of tokens of which only the images are known."""
    image = jnp.asarray(image, jnp.int32)
    b, s = image.shape
    position = jnp.broadcast_to(jnp.arange(s, dtype=jnp.int32), (b, 1, s))
    full = jnp.full(b, s, jnp.int32)
    return Sequence(jnp.zeros((b, s, 2)), position, full, full, image, image)


def test_the_last_tokens_mean_attention_decides():
    # Token 0 and the last two are text. The mean over heads is
    # [.05 .15 .21 .1 .16 .13 .1 .1], so tokens 2 and 4 are the best two of 1 to 5.
    taps = {"attention.1": jnp.asarray(HEADS)[None, :, None]}
    cut = FastV().cuts(config(), 9)[0]
    _, keep = FastV().drop((), cut, rows(IMAGE), taps, jnp.array([[2]]))
    np.testing.assert_array_equal(np.flatnonzero(keep[0]), [0, 2, 4, 6, 7])


def test_ties_go_to_the_earlier_token_and_images_do_not_compete():
    image = jnp.array([[-1, 0, 0, 0, -1, 1, 1, 1, -1, -1]] * 2)
    scores = jnp.array([[9, 1, 2, 2, 9, 5, 5, 5, 0, 0], [0, 3, 1, 2, 0, 1, 2, 3, 9, 9]], float)
    keep = keep_best(scores, image, jnp.array([[1, 2], [2, 0]]))
    np.testing.assert_array_equal(keep[0], [1, 0, 1, 0, 1, 1, 1, 0, 1, 1])
    np.testing.assert_array_equal(keep[1], [1, 1, 0, 1, 1, 0, 0, 0, 1, 1])


def config(layers=32, image_size=24):
    raw = tiny_hf_config(text={"num_hidden_layers": layers}, vision={"image_size": image_size})
    return LlavaConfig.from_hf(raw)


@pytest.mark.parametrize(
    ("layer", "budget", "exact", "kept"),
    [
        (2, 192, 166.4, 166),
        (2, 128, 98.1, 98),
        (2, 64, 29.9, 30),
        (3, 192, 152.3, 152),
        (3, 128, 81.7, 82),
        (3, 64, 11.0, 11),
    ],
)
def test_a_budget_may_be_the_mean_over_the_layers(layer, budget, exact, kept):
    fastv = FastV(Budget("count", budget), layer=layer, average=True)
    fastv.check(config(), 576)
    assert fastv.survivors(config(), 576) == (Survivors(kept),)
    assert kept == round(exact)
    assert (layer * 576 + (32 - layer) * exact) / 32 == pytest.approx(budget, abs=0.05)
    fastv = FastV(Budget("count", budget), layer=layer)
    assert fastv.survivors(config(), 576) == (Survivors(budget),)
    assert fastv.layer_tokens(config(), 576) == [576] * layer + [budget] * (32 - layer)


def test_a_budget_of_all_tokens_is_one_in_both_ways_to_count():
    for average in (False, True):
        for budget in (Budget(), Budget("count", 576), Budget("rate", Fraction(1))):
            fastv = FastV(budget, average=average)
            fastv.check(config(), 576)
            assert fastv.survivors(config(), 576) == (Survivors(576),)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"layer": 0}, "fastv: layer is 0, expected 1 to 31"),
        ({"layer": 32}, "fastv: layer is 32, expected 1 to 31"),
        ({"layer": -1}, "fastv: layer is -1, expected 1 to 31"),
        (
            {"layer": 4, "average": True},
            "fastv: an average of 64 over 32 layers is out of reach, as the first 4 see all 576 "
            "tokens",
        ),
    ],
)
def test_what_cannot_be_is_refused(fields, message):
    with pytest.raises(ValueError, match=f"^{message}$"):
        FastV(Budget("count", 64), **fields).check(config(), 576)


def test_a_cut_is_before_the_layer():
    expected = LayerCut(2, (Tap("attention", 1),), "last")
    assert FastV(Budget("count", 3)).cuts(config(), 9) == (expected,)
    assert FastV(Budget("count", 3)).entering(9) == 9


@pytest.fixture(scope="module")
def both(tmp_path_factory):
    return pair(tmp_path_factory.mktemp("model"), text={"num_hidden_layers": 4})


@pytest.mark.parametrize(("layer", "count"), [(1, 4), pytest.param(3, 2, marks=pytest.mark.slow)])
def test_generation_equals_the_torch_reference(both, layer, count):
    prompts, images = ask(3, seed=layer)  # with two images, none and one
    assert [len(row) for row in images] == [2, 0, 1]
    begun = []
    answers = generate(
        both.ours,
        prompts,
        images,
        pruner="fastv",
        budget=count,
        max_tokens=5,
        stop_ids=(),
        pruner_options={"layer": layer},
        warm_up=False,
        trace=begun.append,
    )

    def drop(core, entered):
        last = torch_stages.attention(core, layer - 1, entered[layer - 1], [-1])
        return torch_stages.keeping_best(last[:, 0].mean(0), entered[-1], [count] * len(shown))

    for row, (prompt, shown) in enumerate(zip(prompts, images, strict=True)):
        expected = torch_stages.staged(both, prompt, shown, {layer: drop}, 5)
        expected.check(trace_arrays(begun[0], row), answers[row])
