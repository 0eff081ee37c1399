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
    found = []
    for seed in (1, 2):
        file = io.BytesIO()
        random_image(seed).save(file, "PNG")
        found.append(file.getvalue())
    return [found[n % 2] for n in range(len(TEXTS))]


@pytest.fixture(scope="module")
def asked(llava_model, shown):
    pairs = enumerate(zip(TEXTS, shown, strict=True))
    questions = [BenchmarkQuestion(n, text, text, image) for n, (text, image) in pairs]
    return encode_questions(llava_model, questions, batch_size=2)


@pytest.fixture
def ranked(monkeypatch):
    """The batches that are ranked."""
    made, rank = [], pipeline.rank

    def watched(*arguments):
        made.append(arguments)
        return rank(*arguments)

    monkeypatch.setattr(pipeline, "rank", watched)
    return made


def test_variants_share_a_ranking_and_answer_as_generate_does(llava_model, asked, shown, ranked):
    policy, some = stepprune(), np.array([3, 0])
    variants = [
        (policy, None),
        (policy.with_budget(2), None),
        (policy.with_budget("4/9"), some),
        (policy.replace(stop_bias=-1000.0), None),
    ]
    generator = Generator(llava_model, policy, options=THREE)
    found = list(generator.answer_set(asked, TWO_EACH, variants))
    assert len(ranked) == 2  # batches of two of four questions
    counts = set()
    for (pruner, rows), answers in zip(variants, found, strict=True):
        rows = range(4) if rows is None else rows
        prompts, images = ([part[row] for row in rows] for part in (TEXTS, shown))
        alone = generate(llava_model, prompts, images, pruner, options=THREE)
        assert answers.texts == [answer.text for answer in alone]
        assert answers.kept.tolist() == [answer.kept for answer in alone]
        for order, answer in zip(answers.order, alone, strict=True):
            assert order.tolist() == [*answer.kept_indices[0]]
        counts.add(tuple(answers.kept.tolist()))
    assert (2, 2, 2, 2) in counts and (4, 4) in counts and len(counts) == 4


def test_the_pruner_itself_answers_all_if_nothing_else_is_said(llava_model, asked, shown, ranked):
    cut = FastV(budget=4, layer=1)
    (answers,) = Generator(llava_model, cut, options=THREE).answer_set(asked, TWO_EACH)
    alone = generate(llava_model, TEXTS, shown, cut, options=THREE)
    assert answers.texts == [answer.text for answer in alone] and not ranked
    assert [order.tolist() for order in answers.order] == [[*a.kept_indices[0]] for a in alone]


def test_a_variant_is_answered_when_it_is_asked_for(llava_model, asked, monkeypatch):
    begun, begin = [], pipeline.begin
    monkeypatch.setattr(pipeline, "begin", lambda *how: begun.append(how) or begin(*how))
    policy = stepprune()
    variants = [(policy.with_budget(count), None) for count in (2, 3)]
    answers = Generator(llava_model, policy, options=THREE).answer_set(asked, TWO_EACH, variants)
    assert not begun
    for batches in (2, 4):
        next(answers)
        assert len(begun) == batches


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
    measured, longer = asked._replace(seconds=0.0), RunOptions(max_tokens=13)
    # A program of a length of answers that no other test asks for.
    generator = Generator(llava_model, stepprune().with_budget(3), options=longer)
    (first,), (again,) = (generator.answer_set(measured, Batching(4)) for _ in range(2))
    assert np.isnan(first.seconds).all() and (again.seconds > 0).all()
    assert first.texts == again.texts
    assert milliseconds(again.seconds[0]) > 0 and milliseconds(first.seconds[0]) is None
