"""Rows of the table, question by question: what they keep and answer is what `generate` does."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from small_world import glimpse, one_shot, stepprune, write_split

from stepprune_jax.checkpoints.load import load_vlm
from stepprune_jax.evaluation.calibrate import stop_biases, stop_margins
from stepprune_jax.evaluation.encode import check_lengths, encode_questions
from stepprune_jax.evaluation.rows import plan_rows
from stepprune_jax.evaluation.settings import EvalSettings
from stepprune_jax.evaluation.split import read_split
from stepprune_jax.inference import RunOptions, generate, sets
from stepprune_jax.inference.decoding import run_decode
from stepprune_jax.inference.pipeline import place_method
from stepprune_jax.inference.programs import run_begin, run_rank
from stepprune_jax.inference.sets import Batching, answer_all, rank_all
from stepprune_jax.models.llava import LLAVA
from stepprune_jax.models.stack import Execution
from stepprune_jax.parallel.sharding import build_mesh
from stepprune_jax.pruning import Budget, Policy, make_method
from stepprune_jax.pruning.method import NO_PRUNING

N, STEPS = 9, 4
SETTINGS = EvalSettings(budgets=(4, 2), batch_size=4)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("data")
    write_split(folder, "test", 5, 0)
    write_split(folder, "validation", 3, 1)
    return folder


@pytest.fixture(scope="module")
def test_split(folder):
    return read_split(folder, "test")


@pytest.fixture(scope="module")
def test(model, test_split):
    return encode_questions(model, test_split.questions, batch_size=4)


@pytest.fixture(scope="module")
def margins(model, folder):
    """Stop margins of the policy on the validation split."""
    questions = read_split(folder, "validation").questions
    return stop_margins(model, stepprune(3), questions, Execution(), 4)


def ask(model, split, method=NO_PRUNING):
    texts = [question.text for question in split.questions]
    images = [question.image for question in split.questions]
    options = RunOptions(3, "original", warm_up=False)
    return generate(model, texts, images, method, options=options)


def rank(model, method, encoded, steps, batch_size=4):
    ranking, seconds = rank_all(
        model,
        place_method(model, method),
        encoded.prompts,
        encoded.images,
        steps=steps,
        batch_size=batch_size,
    )
    assert seconds > 0
    return ranking


def answer(model, method, encoded, ranking=None):
    answers = answer_all(
        model,
        place_method(model, method),
        encoded.prompts,
        encoded.images,
        RunOptions(max_tokens=3, positions="original"),
        Batching(4, (2, 4, 9)),
        ranking=ranking,
    )
    assert (answers.seconds > 0).all()
    return answers


def test_all_tokens_are_answered_as_by_generate(model, test, test_split):
    answers = answer(model, NO_PRUNING, test)
    said = [a.text for a in ask(model, test_split)]
    assert answers.texts == said and len(set(said)) > 3
    assert answers.kept.tolist() == [N] * 15


def test_a_question_takes_as_long_in_a_batch_that_is_not_full(model, test, monkeypatch):
    # What is left of an interrupted run fills no batch, whose time is that of a full one.
    monkeypatch.setattr(sets, "timed", lambda run: (run(), 6.0))
    few = test.take(np.arange(5))
    assert answer(model, NO_PRUNING, few).seconds.tolist() == [6.0 / 4] * 5
    method = place_method(model, make_method(policy=stepprune(3)))
    _, seconds = rank_all(model, method, few.prompts, few.images, steps=STEPS, batch_size=4)
    assert seconds == 6.0 / 4


def test_a_policy_keeps_and_answers_as_by_generate(model, test, test_split, margins):
    policy = stepprune(3)
    ranking = rank(model, make_method(policy=policy), test, STEPS)
    exact = answer(model, make_method(None, 3, policy=policy), test, ranking)
    by_hand = ask(model, test_split, make_method(None, 3, policy=policy))
    assert exact.texts == [a.text for a in by_hand]
    (bias,) = stop_biases(policy, margins, [2])
    mean = Budget("mean", 2)
    adaptive = answer(model, make_method(None, mean, policy=policy, stop_bias=bias), test, ranking)
    alone = ask(model, test_split, make_method(policy=policy, stop_bias=bias))
    assert adaptive.kept.tolist() == [a.kept for a in alone]
    assert adaptive.texts == [a.text for a in alone]
    assert list(map(len, adaptive.order)) == adaptive.kept.tolist()
    assert 1 < adaptive.kept.mean() < 3 and adaptive.kept.std() > 0


def test_a_ranking_of_projected_tokens_is_answered_as_by_generate(model, test, test_split):
    method = make_method("cdpruner", 3)
    answers = answer(model, method, test, rank(model, method, test, STEPS))
    by_hand = ask(model, test_split, method)
    assert answers.texts == [a.text for a in by_hand]
    assert [list(order) for order in answers.order] == [list(*a.kept_indices) for a in by_hand]


def test_a_method_that_decides_between_layers_has_a_row_of_its_own(model, test_split):
    config = glimpse(selected_layers=(0,), reduce_layer=0, use_attention_logits=True)
    policy = Policy.init(jax.random.key(1), config, None)
    settings = dataclasses.replace(SETTINGS, own_stops=("found",))
    rows = plan_rows(settings, model.config, {"found": policy}, {}, 0, untrained=False)
    names = [(row.label, row.mode, row.count(N)) for row in rows]
    exact = [("found", "exact", 4), ("found", "exact", 2)]
    assert names == [*exact, ("found, own stop", "adaptive", None)]
    taps = policy.pruner.taps(model.config)
    encoded = encode_questions(model, test_split.questions, batch_size=4, taps=taps)
    for row in rows[1:]:
        answers, alone = answer(model, row.method, encoded), ask(model, test_split, row.method)
        assert answers.texts == [a.text for a in alone]
        assert answers.kept.tolist() == [a.kept for a in alone]
        assert [list(order) for order in answers.order] == [list(*a.kept_indices) for a in alone]
    assert answers.kept.std() > 0


def test_orders_do_not_depend_on_the_batch_or_the_number_of_steps(model, test):
    method = make_method(policy=stepprune(3))
    ranking = rank(model, method, test, STEPS)
    other = rank(model, method, test, 2, batch_size=15)
    np.testing.assert_array_equal(ranking.order[:, :2], other.order)
    np.testing.assert_allclose(ranking.margin[:, :2], other.margin, rtol=1e-4, atol=1e-5)
    assert ranking.order.shape == (15, STEPS)
    assert all(len(set(row)) == STEPS for row in ranking.order.tolist())
    assert len({tuple(row) for row in ranking.order.tolist()}) > 3


def planned(model, policies, adaptive=("StepPrune", "StepPrune literal")):
    biases = {name: {4: 0.5, 2: 1.0} for name in policies if name in adaptive}
    return plan_rows(SETTINGS, model.config, policies, biases, seed=0)


def test_rows_come_in_the_order_of_the_table(model):
    policies = {"StepPrune": stepprune(3), "AutoSelect-like": one_shot()}
    rows = planned(model, policies)
    names = [(row.label, row.mode, row.count(N)) for row in rows]
    assert names[0] == ("all tokens", "exact", 9)
    untrained = ("random", "grid", "downsample", "[CLS] top-K", "SparseVLM", "SparseVLM v2")
    untrained += ("VisionZip", "PruMerge", "PruMerge+", "HoloV", "DivPrune", "CDPruner")
    assert names[1:25] == [(name, "exact", count) for name in untrained for count in (4, 2)]
    assert names[25:] == [
        ("StepPrune", "exact", 4),
        ("StepPrune", "exact", 2),
        ("StepPrune", "adaptive", 4),
        ("StepPrune", "adaptive", 2),
        ("StepPrune, own stop", "adaptive", None),
        ("AutoSelect-like", "exact", 4),
        ("AutoSelect-like", "exact", 2),
    ]
    assert [row.method.params.stop_bias for row in rows[27:30]] == [0.5, 1.0, 0.0]
    assert [row.steps(N) for row in rows] == [9] + [4, 2] * 12 + [4, 2, 4, 4, 4, 4, 2]
    # Rows share a ranking with those of the same method or policy, and with no other.
    keys = [row.ranking for row in rows]
    assert keys[0] is None and keys[9] is None and len(set(keys) - {None}) == 6
    assert len({*keys[25:30]}) == len({*keys[1:3]}) == 1


def test_few_programs_serve_all_rows(model, test_split):
    policies = {"StepPrune": stepprune(3), "StepPrune literal": stepprune(5, min_tokens=0)}
    rows = [row for row in planned(model, policies) if row.ranking or row.label == "all tokens"]
    taps = [tap for row in rows for tap in row.method.pruner.taps(model.config)]
    encoded = encode_questions(model, test_split.questions, batch_size=4, taps=taps)
    sizes = [row.steps(N) for row in rows]
    assert sorted({*sizes}) == [2, 4, 9]
    programs = (run_begin, run_decode, run_rank)

    def compiled():
        return [program.num_compiled() for program in programs]

    def answers(rows):
        rankings = {}
        for row in rows:
            if row.ranking is not None and row.ranking not in rankings:
                rankings[row.ranking] = rank(model, row.method, encoded, STEPS)
        return [answer(model, row.method, encoded, rankings.get(row.ranking)) for row in rows]

    before = compiled()
    first = answers(rows)
    after = compiled()
    new = [b - a for a, b in zip(before, after, strict=True)]
    assert max(new[:2]) <= 3 and new[2] <= 7
    again = answers(rows[::-1])
    assert compiled() == after
    for one, other in zip(first, again[::-1], strict=True):
        assert one.texts == other.texts
        np.testing.assert_array_equal(one.kept, other.kept)
        assert list(map(len, one.order)) == one.kept.tolist()


def test_prompts_beyond_the_context_are_refused(test):
    length = test.prompts.length.copy()
    limit = length[2] = LLAVA.CONTEXT_LIMIT
    with pytest.raises(ValueError, match=f"question 2 takes {limit - 1 + N} embeddings"):
        check_lengths(test._replace(prompts=test.prompts._replace(length=length)), limit)


@pytest.mark.slow
def test_a_mesh_gives_the_same_orders_and_answers(model, test, test_split):
    mesh = build_mesh("data_tensor")
    there = load_vlm(model.folder, mesh, jnp.float32, progress=False)
    encoded = encode_questions(there, test_split.questions, batch_size=4)
    np.testing.assert_allclose(encoded.images.features, test.images.features, rtol=1e-4, atol=1e-5)
    method = make_method(None, 2, policy=stepprune(3))
    rankings = [rank(m, method, some, 2) for m, some in ((model, test), (there, encoded))]
    np.testing.assert_array_equal(rankings[0].order, rankings[1].order)
    assert (
        answer(there, method, encoded, rankings[0]).texts
        == answer(model, method, test, rankings[0]).texts
    )
