"""Grids of symbols: which cells decide an answer, and that the study runs."""

import sys

import jax
import numpy as np
import pytest

from experiments.grids import __main__ as study
from experiments.grids import reader as readers
from experiments.grids import world
from experiments.grids.world import KINDS, NUM_ANSWERS, Grid, sample_questions
from stepprune_jax.user_input import UserError

# Number of cells that decide the answer, by kind of question.
NUM_NEEDED = {"place": {1}, "compare": {2}, "rare": {1}, "count": {*range(6)}, "higher": {2}}
NUM_NEEDED |= {"majority": {4}}


@pytest.mark.parametrize("kind", KINDS)
def test_the_cells_that_decide_an_answer_have_symbols(kind):
    batch = jax.device_get(sample_questions(jax.random.key(0), Grid(12), 64, (kind,)))
    assert {*batch.needed.sum(axis=1).tolist()} == NUM_NEEDED[kind]
    assert not (batch.needed & ~batch.filled).any()
    assert (batch.answer >= 0).all() and (batch.answer < NUM_ANSWERS).all()


def test_an_answer_depends_on_the_needed_cells_only():
    """Two cells of one row with the same symbol have tokens that differ by column and noise."""
    batch = jax.device_get(sample_questions(jax.random.key(1), Grid(4), 256, ("place",)))
    tokens_by_answer = {}
    for row in range(256):
        token = batch.tokens[row][batch.needed[row]][0]
        tokens_by_answer.setdefault(int(batch.answer[row]), []).append(token)
    means = np.stack([np.mean(tokens, axis=0) for _, tokens in sorted(tokens_by_answer.items())])
    for answer, tokens in enumerate(tokens for _, tokens in sorted(tokens_by_answer.items())):
        distance = np.square(np.mean(tokens[::2], axis=0) - means).sum(axis=1)
        assert distance.argmin() == answer


def test_a_question_about_two_cells_says_which_column_belongs_to_which_row():
    """Without the order of the words, two pairs of cells share a question."""
    grid = Grid(4)
    batch = sample_questions(jax.random.key(0), grid, 16, ("compare",))
    reader = readers.init_reader(jax.random.key(1), grid)
    arguments = reader, readers.project(reader, batch.tokens), batch.filled
    swapped_columns = batch.words[:, np.array([0, 3, 2, 1])]
    logits = readers.answer_logits(*arguments, batch.words)
    swapped_logits = readers.answer_logits(*arguments, swapped_columns)
    is_same_question = np.array(batch.words[:, 1] == batch.words[:, 3])
    difference = np.abs(logits - swapped_logits).max(axis=1)
    assert not is_same_question.all() and (difference[~is_same_question] > 1e-2).all()
    assert (difference[is_same_question] == 0).all()


def test_the_higher_of_two_named_shapes_is_the_answer():
    batch = sample_questions(jax.random.key(3), Grid(12), 64, ("higher",))
    named = np.array(batch.words[:, :2]) - len(KINDS) - 2 * 12
    # Of the two cells that decide the answer, each has the named shape whose vector it resembles.
    scores = (np.array(batch.tokens) - 3) @ np.array(world._vectors(0, world.NUM_SHAPES)).T
    scores = np.where(np.array(batch.needed)[..., None], scores, -np.inf)
    rows = np.stack([scores[np.arange(64), :, named[:, i]].argmax(axis=1) // 12 for i in (0, 1)])
    higher = np.where(rows[0] < rows[1], named[:, 0], named[:, 1])
    assert (higher == batch.answer).mean() > 0.9


def test_most_symbols_of_the_named_row_have_the_color_of_the_answer():
    batch = sample_questions(jax.random.key(2), Grid(12), 64, ("majority",))
    question, row = np.arange(64), np.array(batch.words[:, 0]) - len(KINDS)
    in_row = {
        name: np.array(getattr(batch, name)).reshape(64, 12, 12, -1)[question, row]
        for name in ("tokens", "needed", "filled")
    }
    assert (in_row["filled"].sum(axis=(1, 2)) == 6).all()
    assert (in_row["needed"].sum(axis=(1, 2)) == 4).all()
    colors = world.NUM_SHAPES + np.arange(world.NUM_COLORS)
    scores = ((in_row["tokens"] - 3) * in_row["filled"]).sum(axis=1) @ np.array(
        world._vectors(1, 8)
    ).T
    assert (colors[scores.argmax(axis=1)] == batch.answer).mean() > 0.9


def test_a_reader_of_another_grid_is_refused(tmp_path):
    path = tmp_path / "reader.npz"
    readers.save_reader(readers.init_reader(jax.random.key(0), Grid(4)), path)
    assert readers.load_reader(path, Grid(4))["words"].shape == (Grid(4).num_word_types, 64)
    with pytest.raises(UserError, match=r"reader\.npz has another vocabulary"):
        readers.load_reader(path, Grid(5))


@pytest.mark.parametrize(
    ("recipe", "expected"),
    [
        ("rloo", [("rloo", 10)]),
        ("warm_start", [("warm_start", 4), ("rloo", 6)]),
        ("gate_rloo", [("gate", 8), ("rloo", 2)]),
    ],
)
def test_phases_of_a_recipe(recipe, expected):
    assert study.phases(recipe, 10, warm_share=0.4) == expected


def test_the_study_trains_a_reader_and_a_policy(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(readers, "MODEL_WIDTH", 8)
    monkeypatch.setattr(study, "MODEL_WIDTH", 8)
    monkeypatch.setattr(study, "READER_STAGES", ((2, 4, 4), (2, 0, 4)))
    monkeypatch.setattr(study, "NUM_TEST_QUESTIONS", 8)
    monkeypatch.setattr(study, "BUDGETS", (2,))
    arguments = ["--side", "4", "--kinds", "place", "--updates", "4", "--workdir", str(tmp_path)]
    monkeypatch.setattr(sys, "argv", ["grids", *arguments])
    study.main()
    output = capsys.readouterr().out
    assert "all tokens, place: " in output and "with 16.0" in output
    # The trial of one update cannot help; the recipe follows from what random subsets gain.
    assert "auto: rloo; " in output or "auto: gate_rloo; " in output
    assert "warm_start 0: " in output and "rloo 0: " in output
    assert "rloo, 1 a step, 2, place: " in output and "rloo, 1 a step, adaptive, place: " in output
    assert len([*tmp_path.glob("reader-4-place.npz")]) == 1
