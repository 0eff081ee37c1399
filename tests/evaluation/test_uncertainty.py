"""Errors, intervals and tests of scores, compared with values worked out by hand."""

import json
import math

import numpy as np
import pytest
from benchmark_files import answer, write_lines
from benchmark_folders import write_benchmarks

from stepprune_jax.benchmarks import BENCHMARKS
from stepprune_jax.benchmarks.answer_files import AnswerFile, Provenance
from stepprune_jax.evaluation.comparison import compare_rows
from stepprune_jax.evaluation.scores import score_files
from stepprune_jax.evaluation.uncertainty import (
    Outcomes,
    bootstrap,
    mcnemar_test,
    pack,
    score_of,
    standard_error,
    summarize,
    unpack,
)


def grades(text):
    """Returns outcomes of questions from a text of 0 (wrong) and 1 (correct)."""
    return Outcomes("mean", np.zeros(len(text), int), np.array([float(word) for word in text]))


def row(text):
    """Returns the scores of a table row on one benchmark."""
    outcomes = grades(text)
    return {"folder": {"headline": score_of(outcomes), "outcomes": pack(outcomes)}}


def test_the_standard_error_of_an_accuracy_is_binomial():
    # Three of four: variance .75 * .25 * 4 / 3 = .25 of a question, and sqrt(.25 / 4) = .25.
    assert standard_error(grades("1110")) == pytest.approx(25)
    assert standard_error(grades("1111")) == 0 and standard_error(grades("1")) is None
    # Fractional grades .3, .6 and .9: deviation .3, error .3 / sqrt(3).
    fractions = Outcomes("mean", np.zeros(3, int), np.array([0.3, 0.6, 0.9]))
    assert standard_error(fractions) == pytest.approx(30 / math.sqrt(3))


def test_the_standard_error_of_f1_is_that_of_the_delta_method():
    # Each split: 2 true positives, 1 false positive, 1 false negative. F1 = 4 / 6.
    value = np.tile([1.0, 1.0, 2.0, 3.0], 3)
    outcomes = Outcomes("f1", np.repeat([0, 1, 2], 4), value)
    assert score_of(outcomes) == pytest.approx(200 / 3)
    # With D = 2 TP + FP + FN = 6 of each split, the derivatives of F1 are 2 (FP + FN) / D^2 = 1 / 9
    # by TP, and -2 TP / D^2 = -1 / 9 by FP and by FN, all times the 12 units. A third of each split
    # enters the mean: influences of 4 / 9 and -4 / 9, whose mean is 0 in each split of 4 units.
    deviation = math.sqrt(4 / 3) * 400 / 9
    assert standard_error(outcomes) == pytest.approx(deviation / math.sqrt(12), rel=1e-4)


@pytest.mark.parametrize(
    ("row_text", "reference_text", "expected"),
    [
        # P(X <= 1) of 6 fair trials is 7 / 64, twice that is 14 / 64.
        ("0000011100", "1111101100", (5, 1, 14 / 64)),
        # P(X <= 0) of 3 fair trials is 1 / 8.
        ("0001", "1111", (3, 0, 2 / 8)),
        ("1010", "0101", (2, 2, 1.0)),
        ("1010", "1010", (0, 0, 1.0)),
    ],
)
def test_mcnemars_test_is_exact(row_text, reference_text, expected):
    result = mcnemar_test(grades(row_text), grades(reference_text))
    assert result == pytest.approx(expected)


def test_mcnemars_test_agrees_with_a_sum_of_binomial_coefficients():
    lost, gained = 130, 97
    total = lost + gained
    tail = sum(math.comb(total, k) for k in range(gained + 1)) / 2**total
    row_text = "0" * lost + "1" * gained
    reference_text = "1" * lost + "0" * gained
    assert mcnemar_test(grades(row_text), grades(reference_text)).p == pytest.approx(2 * tail)


def test_the_interval_has_the_quantiles_of_the_binomial_distribution():
    # The reference is always correct, so the retention of a resample is binomial with 100 trials of
    # probability 1/2. Its quantiles of 2.5 and 97.5 % are 40 and 60, its deviation is 5.
    unpruned, half = bootstrap([grades("1" * 100), grades("10" * 50)], seed=0)
    interval = summarize(100 * half / unpruned)
    assert interval[:2] == (40, 60) and interval.standard_error == pytest.approx(5, abs=0.2)
    assert np.array_equal(bootstrap([grades("10" * 50)], seed=0)[0], half)


def test_the_interval_of_retention_is_paired():
    # Both rows err on the same questions, so their ratio is the same in each resample.
    equal, fewer, blind = compare_rows(
        [row("1100" * 10), row("1000" * 10), row("0000" * 9 + "1000")], unpruned=0, blind=2
    )
    assert equal.retention[:2] == (100, 100) and not equal.tests
    assert fewer.retention.low < 50 < fewer.retention.high < 100
    assert fewer.tests["folder"][:2] == (10, 0)
    # The gain of the image over the blind model is smaller than the score, and so is its share.
    assert fewer.image_gain.low < fewer.retention.low and blind.image_gain[:2] == (0, 0)


def test_rows_on_other_questions_are_not_paired():
    first, second = row("1100"), row("110")
    assert compare_rows([first, second], unpruned=0, blind=None)[1].retention is None
    assert compare_rows([first, second], unpruned=None, blind=None)[0].retention is None
    partial = {"folder": first["folder"] | {"scored": 4}}
    assert not compare_rows([first, partial], unpruned=0, blind=None)[1].tests


def test_splits_keep_their_sizes_in_resamples():
    # Each split has one unit, so every resample is the sample.
    outcomes = Outcomes("f1", np.array([2, 0, 1]), np.array([1.0, 1.0, 1.0]))
    assert np.all(bootstrap([outcomes], seed=0) == 100)
    assert standard_error(outcomes) is None


def test_outcomes_survive_packing():
    outcomes = Outcomes("mme", np.array([0, 13, 2]), np.array([2.0, 1, 0]))
    assert pack(outcomes) == {"statistic": "mme", "units": "2 13:1 2:0"}
    unpacked = unpack(json.loads(json.dumps(pack(outcomes))))
    assert unpacked.statistic == "mme"
    np.testing.assert_array_equal(unpacked.group, outcomes.group)
    np.testing.assert_array_equal(unpacked.value, outcomes.value)


@pytest.mark.parametrize("units", ["", "nan", "x", "7:1", "-1:1", "1 inf"])
def test_malformed_outcomes_are_refused(units):
    with pytest.raises(ValueError, match=r"outcomes|convert|invalid"):
        unpack({"statistic": "f1", "units": units})


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    return write_benchmarks(tmp_path_factory.mktemp("eval") / "eval")


def score_lines(root, path):
    """Returns the score of a file that is named after its benchmark."""
    num_questions = len(BENCHMARKS[path.stem].read_questions(root))
    provenance = Provenance(path.stem, "q", num_questions, "grid", "exact", 4, 9, None, "model")
    return score_files([AnswerFile(path, provenance)], root, lambda file: None)[path]


@pytest.mark.parametrize("name", ["gqa", "mmbench", "mme", "pope", "scienceqa", "textvqa"])
def test_every_benchmark_scores_its_outcomes_as_its_program_does(root, tmp_path, name):
    random = np.random.default_rng(0)
    texts = random.choice(["yes", "no", "A", "B", "red", "2"], 30).tolist()
    if name in ("mme", "pope"):
        texts = random.choice(["yes", "no"], 30).tolist()
    pairs = zip(BENCHMARKS[name].read_questions(root), texts, strict=False)
    lines = [answer(q.question_id, text, q.prompt) | {"kept": 4} for q, text in pairs]
    path = write_lines(tmp_path / f"{name}.jsonl", lines)
    score = score_lines(root, path)
    assert score["problem"] is None
    outcomes = unpack(score["outcomes"])
    assert score_of(outcomes) == pytest.approx(score["headline"], abs=0.006)
    # Units are sorted by question, so the order of the file does not matter.
    write_lines(path, lines[::-1])
    assert score_lines(root, path)["outcomes"] == score["outcomes"]
