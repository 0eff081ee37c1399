"""Whole sets of questions, answered by several budgets of a method."""

import io

import numpy as np
import pytest
from generation_reference import random_image
from small_world import TEXTS, broken_at, stepprune

from stepprune_jax.benchmarks.questions import BenchmarkQuestion
from stepprune_jax.inference import (
    Batching,
    Generator,
    NotFiniteError,
    RunOptions,
    encode_questions,
    generate,
    pipeline,
)
from stepprune_jax.inference.dataset import milliseconds
from stepprune_jax.pruning import DivPrune, FastV, Grid
from stepprune_jax.user_input import UserError

THREE, TWO_EACH = RunOptions(max_tokens=3), Batching(2)
pytestmark = pytest.mark.usefixtures("few_programs")


@pytest.fixture(scope="module")
def shown():
    """Two images, of four questions."""
    files = []
    for seed in (1, 2):
        file = io.BytesIO()
        random_image(seed).save(file, "PNG")
        files.append(file.getvalue())
    return [files[n % 2] for n in range(len(TEXTS))]


@pytest.fixture(scope="module")
def asked(llava_model, shown):
    pairs = enumerate(zip(TEXTS, shown, strict=True))
    questions = [BenchmarkQuestion(n, text, text, image) for n, (text, image) in pairs]
    return encode_questions(llava_model, questions, batch_size=2)


@pytest.fixture
def ranked(monkeypatch):
    """The batches that are ranked."""
    batches, rank = [], pipeline.rank

    def watched_rank(*arguments):
        batches.append(arguments)
        return rank(*arguments)

    monkeypatch.setattr(pipeline, "rank", watched_rank)
    return batches


def test_variants_share_a_ranking_and_answer_as_generate_does(llava_model, asked, shown, ranked):
    policy, rows_of_variant = stepprune(), np.array([3, 0])
    variants = [
        (policy, None),
        (policy.with_budget(2), None),
        (policy.with_budget("4/9"), rows_of_variant),
        (policy.replace(stop_bias=-1000.0), None),
    ]
    generator = Generator(llava_model, policy, options=THREE)
    answers_of_variants = list(generator.answer_set(asked, TWO_EACH, variants))
    assert len(ranked) == 2  # batches of two of four questions
    counts = set()
    for (pruner, rows), answers in zip(variants, answers_of_variants, strict=True):
        rows = range(4) if rows is None else rows
        prompts, images = ([part[row] for row in rows] for part in (TEXTS, shown))
        generated = generate(llava_model, prompts, images, pruner, options=THREE)
        assert answers.texts == [answer.text for answer in generated]
        assert answers.kept.tolist() == [answer.kept for answer in generated]
        for order, answer in zip(answers.order, generated, strict=True):
            assert order.tolist() == [*answer.kept_indices[0]]
        counts.add(tuple(answers.kept.tolist()))
    assert (2, 2, 2, 2) in counts and (4, 4) in counts and len(counts) == 4


def test_the_pruner_itself_answers_all_if_nothing_else_is_said(llava_model, asked, shown, ranked):
    cut = FastV(budget=4, layer=1)
    (answers,) = Generator(llava_model, cut, options=THREE).answer_set(asked, TWO_EACH)
    generated = generate(llava_model, TEXTS, shown, cut, options=THREE)
    assert answers.texts == [answer.text for answer in generated] and not ranked
    assert [order.tolist() for order in answers.order] == [[*a.kept_indices[0]] for a in generated]


def test_a_variant_is_answered_when_it_is_asked_for(llava_model, asked, monkeypatch):
    calls, run = [], pipeline.first_tokens

    def watched(*arguments, **options):
        calls.append(arguments)
        return run(*arguments, **options)

    monkeypatch.setattr(pipeline, "first_tokens", watched)
    policy = stepprune()
    variants = [(policy.with_budget(count), None) for count in (2, 3)]
    answers = Generator(llava_model, policy, options=THREE).answer_set(asked, TWO_EACH, variants)
    assert not calls
    for batches in (2, 4):
        next(answers)
        assert len(calls) == batches


def test_a_question_with_broken_logits_costs_no_other_its_answer(llava_model, asked):
    """The third of four questions is the only one about a dog."""
    cut = FastV(budget=4, layer=1)
    healthy, broken = (
        Generator(model, cut, options=THREE)
        for model in (llava_model, broken_at(llava_model, "▁dog"))
    )
    (expected,) = healthy.answer_set(asked, TWO_EACH)
    (answers,) = broken.answer_set(asked, TWO_EACH, partial=True)
    assert answers.finite.tolist() == [True, True, False, True] and expected.finite.all()
    assert answers.texts == [*expected.texts[:2], "", expected.texts[3]]
    with pytest.raises(NotFiniteError, match=r"^prompt 2: the model's logits are not") as caught:
        list(broken.answer_set(asked, TWO_EACH))
    assert caught.value.answers.texts == answers.texts


def test_every_variant_needs_a_budget(llava_model, asked):
    generator = Generator(llava_model, Grid(4), options=THREE)
    for variants in ([(Grid(), None)], [(Grid(4), None), (DivPrune(), None)]):
        with pytest.raises(UserError, match=f"'{variants[-1][0].name}' needs a budget"):
            generator.answer_set(asked, TWO_EACH, variants)


def test_a_batch_that_compiles_has_no_time(llava_model, asked):
    questions, options = asked._replace(seconds=0.0), RunOptions(max_tokens=13)
    # A program of a length of answers that no other test asks for.
    generator = Generator(llava_model, stepprune().with_budget(3), options=options)
    (first,), (second,) = (generator.answer_set(questions, Batching(4)) for _ in range(2))
    assert np.isnan(first.seconds).all() and (second.seconds > 0).all()
    assert first.texts == second.texts
    assert milliseconds(second.seconds[0]) > 0 and milliseconds(first.seconds[0]) is None
