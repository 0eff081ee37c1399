"""A diagnosis: the sets it compares, and the words it finds."""

import dataclasses
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from stepprune_jax.policy import FeatureStats
from stepprune_jax.selectors import AutoSelect, AutoSelectConfig, Policy, SubsetGain
from stepprune_jax.selectors.diagnosis import (
    ALL,
    API_REMEDIES,
    CONFIG_REMEDIES,
    NONE,
    OTHER_QUESTION,
    POLICY,
    RANDOM,
    describe,
)

B, N = 64, 9
LOSSES = {ALL: 0.1, NONE: 3.1, RANDOM: 2.5, POLICY: 0.4, OTHER_QUESTION: 2.0}


def words(entropy=1.0, agreement=0.9, recipe="", remedies=API_REMEDIES, **changes):
    noise = np.random.default_rng(0).normal(size=B) * 0.01
    values = LOSSES | {globals()[name]: value for name, value in changes.items()}
    losses = {name: value + noise for name, value in values.items()}
    return describe(4, losses, entropy, agreement, recipe=recipe, remedies=remedies).findings


FAR_FROM_ALL = {"NONE": 3.0, "RANDOM": 2.7, "POLICY": 2.5, "OTHER_QUESTION": 2.7}


@pytest.mark.parametrize(
    "case, expected_parts",
    [
        ({}, ()),
        ({"RANDOM": 0.45}, ("no better than random",)),
        ({"OTHER_QUESTION": 0.42}, ("does not read the question",)),
        # A policy that is as good as all tokens need not read it.
        ({"POLICY": 0.1, "OTHER_QUESTION": 0.1}, ()),
        ({"entropy": 0.01}, ("saturated",)),
        ({"agreement": 0.2}, ("not what training opens",)),
        ({"NONE": 0.1}, ("does not read the image",)),
        # A sixth of what all tokens gain, whatever random ones and another question's do.
        (FAR_FROM_ALL, ("far from all tokens: 17 %",)),
        ({"RANDOM": 0.3, "entropy": 0.0}, ("no better than random", "saturated")),
        # The recipe: vain sets, and sets that were not drawn though they would teach.
        ({"RANDOM": 0.45, "recipe": "rloo"}, ("from which its sampled subsets began",)),
        ({"recipe": "rloo"}, ()),
        ({"RANDOM": 3.0, "recipe": "gate"}, ()),
        ({"RANDOM": 1.5, "recipe": "gate"}, ("though random tokens gain 21 %",)),
        ({"RANDOM": 1.5}, ()),
        # With all tokens' answers there is nothing to mend.
        ({"RANDOM": 1.5, "POLICY": 0.1, "recipe": "gate"}, ()),
    ],
)
def test_findings_describe_the_problem(case, expected_parts):
    findings = words(**case)
    assert len(findings) == len(expected_parts)
    for finding, part in zip(findings, expected_parts, strict=True):
        assert part in finding


@pytest.mark.parametrize(
    ("case", "python", "command"),
    [
        ({"RANDOM": 0.45, "recipe": "rloo"}, "Policy.warm_start_loss", 'config.recipe="auto"'),
        ({"RANDOM": 1.5, "recipe": "gate"}, "Policy.rloo_loss", 'config.recipe="rloo"'),
        ({"OTHER_QUESTION": 0.42}, "Progress(text_gate=1.0)", "config.text_gate_anneal"),
        ({"entropy": 0.01}, "`temperature`", "config.policy.temperature"),
        ({"agreement": 0.2}, "policy.replace(draw=1.0)", "config.policy.draw"),
    ],
)
def test_remedies_are_in_the_words_of_the_reader(case, python, command):
    assert python in words(**case)[0] and "config." not in words(**case)[0]
    finding = words(remedies=CONFIG_REMEDIES, **case)[0]
    assert command in finding and "Policy." not in finding


def test_remedies_name_functions_that_exist():
    for name in re.findall(r"\bPolicy\.(\w+)", " ".join(API_REMEDIES)):
        assert callable(getattr(Policy, name))


@pytest.mark.parametrize(("gain", "is_enough"), [(0.075, True), (0.065, False)])
def test_the_gain_of_random_tokens_is_judged_as_the_gain_of_subsets(gain, is_enough):
    """Half of the answers gain 0.06 more, half 0.06 less: an error of 0.0075 over 64 rows."""
    spread = 0.06
    subset_gain = SubsetGain(sets=gain, luck=0.0, all=1.0, error=spread / B**0.5, questions=B)
    assert subset_gain.suffices == is_enough
    prob = {ALL: 1.0, NONE: 1e-9, POLICY: 0.2, OTHER_QUESTION: 0.02}
    losses = {name: np.full(B, -np.log(value)) for name, value in prob.items()}
    losses[RANDOM] = -np.log(gain + np.tile([spread, -spread], B // 2))
    findings = describe(4, losses, recipe="gate").findings
    assert any("though random tokens gain" in finding for finding in findings) == is_enough


def test_differences_within_their_standard_error_are_ignored():
    difference = np.tile([4.0, -2.0], B // 2)  # mean 1, deviation 3: 2.7 errors of 64, 0.9 of 8
    losses = {name: np.full(B, value) for name, value in LOSSES.items()}
    diagnosis = describe(4, losses | {RANDOM: losses[POLICY] + difference}, 1.0, 1.0)
    assert not diagnosis.findings and str(diagnosis).endswith("\nno problem found")
    without_gain = losses | {NONE: losses[ALL] + difference / 10, POLICY: losses[ALL]}
    assert not describe(4, without_gain, 1.0, 1.0).findings
    (finding,) = describe(4, {name: x[:8] for name, x in without_gain.items()}, 1.0, 1.0).findings
    assert "does not read the image" in finding
    few_questions = {name: x[:8] for name, x in losses.items()}
    few_questions[RANDOM] = few_questions[POLICY] + difference[:8]
    assert "random" in describe(4, few_questions, 1.0, 1.0).findings[0]


@pytest.fixture(scope="module")
def reader():
    """Images with one marked token each, which the answer needs, and random questions."""
    image = np.random.default_rng(1).normal(size=(B, N, 4)).astype(np.float32)
    image[:, :, 0] = -1.0
    image[np.arange(B), np.arange(B) % N, 0] = 1.0
    return jnp.asarray(image), jax.random.normal(jax.random.key(0), (B, 2, 3))


def needs_the_marked(pruned):
    """Returns a loss of 0 for rows that keep the marked token, and of 1 for other rows."""
    is_right = jnp.any((pruned.tokens[..., 0] > 0) & pruned.valid, axis=1)
    return 1.0 - is_right, is_right


def test_each_case_keeps_the_tokens_of_its_name(reader):
    image, text = reader
    config = AutoSelectConfig(feature_width=4, text_width=3, num_heads=2, encoder_layers=1)
    policy = AutoSelect.init(jax.random.key(1), config, FeatureStats.start(4))
    kept_sets = []

    def loss(pruned):
        kept_sets.append(jax.tree.map(np.asarray, pruned))
        return needs_the_marked(pruned)

    mask = np.arange(N) < np.where(np.arange(B) == 3, 5, N)[:, None]
    (diagnosis,) = policy.diagnose(loss, image, text, [2], image_mask=jnp.asarray(mask))
    everything, none_kept, random_kept, policy_kept, other_kept = kept_sets
    np.testing.assert_array_equal(everything.count, mask.sum(1))
    assert not none_kept.valid.any() and (none_kept.index == -1).all()
    for kept in (random_kept, policy_kept, other_kept):
        assert (kept.count == 2).all() and mask[np.arange(B)[:, None], kept.index].all()
    pruned = policy.prune(image, text, budget=2, image_mask=jnp.asarray(mask))
    np.testing.assert_array_equal(policy_kept.index, pruned.index[:, :2])
    swapped = policy.prune(image, jnp.roll(text, 1, 0), budget=2, image_mask=jnp.asarray(mask))
    np.testing.assert_array_equal(other_kept.index, swapped.index[:, :2])
    assert len(np.unique(random_kept.index, axis=0)) > 10
    assert diagnosis.accuracy[NONE] == 0 and diagnosis.loss[NONE].mean() == 1
    # Sampling from nearly equal scores keeps few of the tokens with the largest gates.
    assert 0 < diagnosis.agreement < 0.9 and 0 < diagnosis.entropy < np.log(N)
    greedy = policy.replace(config=dataclasses.replace(config, draw=0.0))
    assert greedy.diagnose(needs_the_marked, image, text, [2])[0].agreement == 1
    assert "no better than random" in str(diagnosis) and "2 tokens" in str(diagnosis)


def test_a_policy_without_text_has_no_case_of_another_question(reader):
    config = AutoSelectConfig(feature_width=4, text_width=0, num_heads=2, encoder_layers=1)
    policy = AutoSelect.init(jax.random.key(1), config, None)
    (diagnosis,) = policy.diagnose(needs_the_marked, reader[0], None, [2])
    assert OTHER_QUESTION not in diagnosis.loss and "no better than random" in str(diagnosis)
    with pytest.raises(ValueError, match=r"shape \(\), expected one for each of the 64 rows"):
        policy.diagnose(lambda pruned: jnp.mean(pruned.tokens), reader[0], None, [1])
    with pytest.raises(ValueError, match="budget is 10, expected"):
        policy.diagnose(needs_the_marked, reader[0], None, [N + 1])
    with pytest.raises(ValueError, match="recipe is 'x', expected gate or rloo"):
        policy.diagnose(needs_the_marked, reader[0], None, [1], recipe="x")
