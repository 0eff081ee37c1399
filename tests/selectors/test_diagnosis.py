"""A diagnosis: the sets it compares, and the words it finds."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from stepprune_jax.policy import FeatureStats
from stepprune_jax.selectors import AutoSelect, AutoSelectConfig
from stepprune_jax.selectors.diagnosis import ALL, NONE, OTHER, OWN, RANDOM, describe

B, N = 64, 9
LOSSES = {ALL: 0.1, NONE: 3.1, RANDOM: 2.5, OWN: 0.4, OTHER: 2.0}


def words(entropy=1.0, agreement=0.9, recipe="", **changes):
    noise = np.random.default_rng(0).normal(size=B) * 0.01
    values = LOSSES | {globals()[name]: value for name, value in changes.items()}
    losses = {name: value + noise for name, value in values.items()}
    return describe(4, losses, entropy, agreement, recipe=recipe).findings


@pytest.mark.parametrize(
    "case, said",
    [
        ({}, ()),
        ({"RANDOM": 0.45}, ("no better than random",)),
        ({"OTHER": 0.42}, ("does not read the question",)),
        # A policy that is as good as all tokens need not read it.
        ({"OWN": 0.1, "OTHER": 0.1}, ()),
        ({"entropy": 0.01}, ("saturated",)),
        ({"agreement": 0.2}, ("not what training opens",)),
        ({"NONE": 0.1}, ("does not read the image",)),
        # A sixth of what all tokens gain, whatever random ones and another question's do.
        ({"NONE": 3.0, "RANDOM": 2.7, "OWN": 2.5, "OTHER": 2.7}, ("far from all tokens: 17 %",)),
        ({"RANDOM": 0.3, "entropy": 0.0}, ("no better than random", "saturated")),
        # The recipe: vain sets, and sets that were not drawn though they would teach.
        ({"RANDOM": 0.45, "recipe": "sets"}, ("from which its sampled sets began",)),
        ({"recipe": "sets"}, ()),
        ({"RANDOM": 3.0, "recipe": "gate"}, ()),
        ({"RANDOM": 1.5, "recipe": "gate"}, ("though random tokens gain 21 %",)),
        ({"RANDOM": 1.5}, ()),
        # With all tokens' answers there is nothing to mend.
        ({"RANDOM": 1.5, "OWN": 0.1, "recipe": "gate"}, ()),
    ],
)
def test_what_is_wrong_is_said_in_words(case, said):
    found = words(**case)
    assert len(found) == len(said)
    for finding, part in zip(found, said, strict=True):
        assert part in finding


def test_differences_within_their_error_are_none():
    apart = np.tile([4.0, -2.0], B // 2)  # mean 1, deviation 3: 2.7 errors of 64, 0.9 of 8
    losses = {name: np.full(B, value) for name, value in LOSSES.items()}
    assert not describe(4, losses | {RANDOM: losses[OWN] + apart}, 1.0, 1.0).findings
    unread = losses | {NONE: losses[ALL] + apart / 10, OWN: losses[ALL]}
    assert not describe(4, unread, 1.0, 1.0).findings
    (said,) = describe(4, {name: x[:8] for name, x in unread.items()}, 1.0, 1.0).findings
    assert "does not read the image" in said
    few = {name: x[:8] for name, x in (losses | {RANDOM: losses[OWN] + apart}).items()}
    assert "random" in describe(4, few, 1.0, 1.0).findings[0]


@pytest.fixture(scope="module")
def reader():
    """Each question names a marker by its sign; a token with it is what an answer needs."""
    image = np.random.default_rng(1).normal(size=(B, N, 4)).astype(np.float32)
    image[:, :, 0] = -1.0
    image[np.arange(B), np.arange(B) % N, 0] = 1.0
    return jnp.asarray(image), jax.random.normal(jax.random.key(0), (B, 2, 3))


def needs_the_marked(pruned):
    """A loss of 0 where the marked token is kept, and of 1 elsewhere."""
    right = jnp.any((pruned.tokens[..., 0] > 0) & pruned.valid, axis=1)
    return 1.0 - right, right


def test_it_compares_the_sets_it_names(reader):
    image, text = reader
    config = AutoSelectConfig(feature_width=4, text_width=3, num_heads=2, encoder_layers=1)
    policy = AutoSelect.init(jax.random.key(1), config, FeatureStats.start(4))
    seen = []

    def loss(pruned):
        seen.append(jax.tree.map(np.asarray, pruned))
        return needs_the_marked(pruned)

    mask = np.arange(N) < np.where(np.arange(B) == 3, 5, N)[:, None]
    (found,) = policy.diagnose(loss, image, text, [2], image_mask=jnp.asarray(mask))
    everything, none, random, own, other = seen
    np.testing.assert_array_equal(everything.count, mask.sum(1))
    assert not none.valid.any() and (none.index == -1).all()
    for kept in (random, own, other):
        assert (kept.count == 2).all() and mask[np.arange(B)[:, None], kept.index].all()
    given = policy.prune(image, text, budget=2, image_mask=jnp.asarray(mask))
    np.testing.assert_array_equal(own.index, given.index[:, :2])
    swapped = policy.prune(image, jnp.roll(text, 1, 0), budget=2, image_mask=jnp.asarray(mask))
    np.testing.assert_array_equal(other.index, swapped.index[:, :2])
    assert len(np.unique(random.index, axis=0)) > 10
    assert found.accuracy[NONE] == 0 and found.loss[NONE].mean() == 1
    # Nearly even scores are drawn from: what is kept is hardly what the gate opens.
    assert 0 < found.agreement < 0.9 and 0 < found.entropy < np.log(N)
    best = policy.replace(config=dataclasses.replace(config, draw=0.0))
    assert best.diagnose(needs_the_marked, image, text, [2])[0].agreement == 1
    assert "no better than random" in str(found) and "2 tokens" in str(found)


def test_a_policy_that_sees_no_question_has_none_of_another(reader):
    config = AutoSelectConfig(feature_width=4, text_width=0, num_heads=2, encoder_layers=1)
    policy = AutoSelect.init(jax.random.key(1), config, None)
    (found,) = policy.diagnose(needs_the_marked, reader[0], None, [2])
    assert OTHER not in found.loss and "no better than random" in str(found)
    with pytest.raises(ValueError, match=r"shape \(\), expected one for each of the 64 rows"):
        policy.diagnose(lambda pruned: jnp.mean(pruned.tokens), reader[0], None, [1])
    with pytest.raises(ValueError, match="budget is 10, expected"):
        policy.diagnose(needs_the_marked, reader[0], None, [N + 1])
    with pytest.raises(ValueError, match="recipe is 'x', expected gate or sets"):
        policy.diagnose(needs_the_marked, reader[0], None, [1], recipe="x")
