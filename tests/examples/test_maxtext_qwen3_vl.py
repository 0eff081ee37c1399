"""StepPrune in front of MaxText's Qwen3-VL, by the example's functions and by what it prints."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import stand_ins
from host_example import run_example

pytest.importorskip("maxtext", reason="MaxText is not installed: docs/hosts.md says how")

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]  # MaxText warns of its own


@pytest.fixture(scope="module")
def example():
    return vars(run_example("maxtext_qwen3_vl.py"))


def test_the_signatures_are_those_of_the_package():
    assert stand_ins.changed_signatures("maxtext") == []


def close(ours, theirs):
    """Within rounding of numbers as large as the largest."""
    np.testing.assert_allclose(ours, theirs, rtol=0, atol=1e-5 * float(jnp.abs(theirs).max()))


def test_with_all_tokens_the_logits_are_those_of_maxtext(example):
    n, (policy, *given) = example["N"], example["given"]
    ours, pruned = example["pruned_forward"](n, policy.with_budget(n), *given)
    real = np.asarray(example["batch"]["inputs_segmentation"]) > 0
    assert (pruned.count == example["N"]).all() and 0 < real.mean() < 1
    close(ours[real], example["host"][real])
    off = float(re.search(r"logits off by (\S+)", example["printed"])[1])
    assert off <= 1e-5 * float(jnp.abs(example["host"]).max())


@pytest.mark.parametrize("budget", [64, "mean:64"])
def test_pruned_logits_are_those_of_maxtext_if_nothing_attends_to_the_other_tokens(example, budget):
    """MaxText itself, with its images, positions and DeepStack, and the others as a segment."""
    policy, weights, batch, pixels = example["given"]
    pruner = policy.with_budget(budget)
    ours, pruned = example["pruned_forward"](128, pruner, weights, batch, pixels)
    segments = np.array(batch["inputs_segmentation"])
    for row, index in enumerate(np.asarray(pruned.index)):
        dropped = np.setdiff1d(np.arange(example["N"]), index)
        segments[row, 1 + dropped] = 2  # behind the token that opens the image
    masked = batch | {"inputs_segmentation": jnp.asarray(segments)}
    theirs = example["plain_forward"](weights, masked, pixels)
    for row, (count, segment) in enumerate(zip(pruned.count, segments, strict=True)):
        kept = segment == 1
        assert kept.sum() - count == (batch["inputs_segmentation"][row] > 0).sum() - example["N"]
        close(ours[row, : kept.sum()], theirs[row][kept])
        assert jnp.abs(theirs[row] - example["host"][row])[kept].max() > 1  # the others matter
    assert ours.shape[1] == theirs.shape[1] - example["N"] + 128


@pytest.mark.parametrize("budget", [64, "mean:64"])
def test_generated_words_are_those_of_maxtext_if_nothing_attends_to_the_other_tokens(
    example, budget
):
    """MaxText without a cache and without pruning reads the generated words, and predicts them."""
    policy, weights, batch, pixels = example["given"]
    pruner = policy.with_budget(budget)
    words, logits = example["generate"](128, pruner, weights, batch, pixels)
    answered = example["answer_with"](batch, words)
    segments = np.array(batch["inputs_segmentation"])
    index = example["pruned_forward"](128, pruner, weights, answered, pixels)[1].index
    for row, kept in enumerate(np.asarray(index)):
        segments[row, 1 + np.setdiff1d(np.arange(example["N"]), kept)] = 2
    masked = answered | {"inputs_segmentation": jnp.asarray(segments)}
    places = np.asarray(batch["targets_segmentation"]) > 0
    predicted = example["plain_forward"](weights, masked, pixels)[places].reshape(logits.shape)
    assert words.shape == (2, example["NEW_WORDS"])
    np.testing.assert_array_equal(np.argmax(predicted, axis=-1), words)
    close(logits, predicted)


def test_one_program_for_all_questions_images_and_counts(example):
    lines = re.findall(r"six images \[(.*)\], programs (\d+)", example["printed"])
    stopped, exact = (np.array(counts.split(), int) for counts, _ in lines)
    assert [programs for _, programs in lines] == ["1", "1"]
    assert len(set(stopped)) > 1 and stopped.max() <= 2 * example["KEPT"]
    assert (exact == example["KEPT"]).all()


def test_the_question_is_read_and_the_answer_is_not(example):
    others = dict(re.findall(r"another (\w+): (\d+)", example["printed"]))
    assert int(others["question"]) > 0 and int(others["answer"]) == 0


def test_words_ahead_of_the_answer(example):
    """Two special tokens and the question, in order, without image, answer and padding."""
    embed, seen = example["model"].token_embedder, []
    model = type("Model", (), {"vision_encoder": lambda *_, **__: (jnp.zeros((2, 1, 1)), [])})()
    model.token_embedder = lambda ids: seen.append(ids) or embed(ids)
    _, _, mask = example["read"](model, *example["given"][2:])
    batch, n = example["batch"], example["N"]
    for row in range(2):
        first = int(jnp.argmax(batch["targets_segmentation"][row]))  # predicts the answer's first
        inputs = np.asarray(batch["inputs"][row])
        expected = [inputs[0], *inputs[n + 1 : first + 1]]
        assert seen[0][row][mask[row]].tolist() == expected


def test_training_changes_the_policy_alone(example):
    update, (policy, weights, batch, pixels) = example["update"], example["given"]
    before = jax.tree.map(np.array, example["nnx"].state(example["model"], example["nnx"].Param))
    trained = update(policy, weights, jax.random.key(0), batch, pixels)
    after = example["nnx"].state(example["model"], example["nnx"].Param)
    assert all(jax.tree.leaves(jax.tree.map(np.array_equal, before, after)))
    assert jax.tree.structure(trained) == jax.tree.structure(policy)
    assert "policy changed True, MaxText's logits same True" in example["printed"]
