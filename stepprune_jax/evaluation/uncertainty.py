"""Estimates how much a score depends on the sample of questions.

The *outcomes* of a table row are its results on the units of a benchmark. A unit is a question, for
MMBench a question with all rotations of its options, and for MME an image with its two questions. A
score is a function of the mean over units, so resampling the units gives the distribution of the
score. Units count as independent, also if several of them show one image.
"""

import math
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Bool, Float, Int

from stepprune_jax.benchmarks import mme, pope
from stepprune_jax.benchmarks.answers import GivenAnswer
from stepprune_jax.benchmarks.questions import IMAGE_MARK
from stepprune_jax.data.json_files import JsonObject

# Resamples of a bootstrap. The ends of a 95 % interval then vary by about 4 % of its half width.
NUM_RESAMPLES = 2000
# Counts of one block of resamples, which limits the memory to 32 MiB.
_BLOCK_SIZE = 1 << 22
# Step of the numerical derivative, relative to the difference between a unit and the mean.
_STEP = 1e-3
# MMBench adds multiples of this number to the index of a question for its rotations.
_ROTATION = 1_000_000
# Outcomes of a yes-or-no question: correct no, correct yes, wrong yes, wrong no.
_TRUE_NEGATIVE, _TRUE_POSITIVE, _FALSE_POSITIVE, _FALSE_NEGATIVE = range(4)
_MME_TASKS = (*mme.PERCEPTION, *mme.COGNITION)


class Outcomes(NamedTuple):
    """The results of a table row on the u units of a benchmark. Built by `read_outcomes`.

    Attributes:
        statistic: name of the score, a key of `_STATISTICS`.
        group: [u] number of the split or task of each unit; 0 without groups.
        value: [u] result of each unit: a grade from 0 to 1, one of the four outcomes of a
            yes-or-no question, or the number of correct answers to an image of MME.
    """

    statistic: str
    group: Int[np.ndarray, "u"]
    value: Float[np.ndarray, "u"]

    def features(self) -> Float[np.ndarray, "u d"]:
        """Returns d numbers per unit, whose mean over units determines the score."""
        return _STATISTICS[self.statistic].features(self)

    def score(self, mean_features: Float[np.ndarray, "*shape d"]) -> Float[np.ndarray, "*shape"]:
        """Returns the score for means of `features`; NaN if a task of MME has no unit."""
        with np.errstate(divide="ignore", invalid="ignore"):
            return _STATISTICS[self.statistic].score(mean_features)

    @property
    def has_all_groups(self) -> bool:
        """Whether each split or task has a unit, as a score needs."""
        return len(np.unique(self.group)) == _NUM_GROUPS[self.statistic]

    def is_correct(self) -> Bool[np.ndarray, "u"]:
        """Returns whether each unit is correct.

        A fractional grade is correct from 0.5 on. An image of MME is correct if both answers are.
        """
        return _STATISTICS[self.statistic].is_correct(self)


class _Statistic(NamedTuple):
    """A score as a function of outcomes; see the methods of `Outcomes` with the same names."""

    features: Callable[[Outcomes], Float[np.ndarray, "u d"]]
    score: Callable[[Float[np.ndarray, "*shape d"]], Float[np.ndarray, "*shape"]]
    is_correct: Callable[[Outcomes], Bool[np.ndarray, "u"]]


def _one_hot_groups(
    outcomes: Outcomes, num_groups: int, columns: Sequence[np.ndarray]
) -> Float[np.ndarray, "u d"]:
    """Places columns of values at the group of each unit; all other groups are 0.

    Args:
        outcomes: the outcomes, with the group of each unit.
        num_groups: number of groups g.
        columns: c arrays [u].

    Returns:
        [u, g * c] the columns of group 0, then the columns of group 1, and so on.
    """
    num_units = len(outcomes.group)
    features = np.zeros((num_units, num_groups, len(columns)))
    features[np.arange(num_units), outcomes.group] = np.stack(columns, axis=-1)
    return features.reshape(num_units, -1)


def _yes_no_features(outcomes: Outcomes) -> Float[np.ndarray, "u d"]:
    """Returns the numbers of true positives, false positives and false negatives by split."""
    kinds = (_TRUE_POSITIVE, _FALSE_POSITIVE, _FALSE_NEGATIVE)
    return _one_hot_groups(outcomes, len(pope.SPLITS), [outcomes.value == kind for kind in kinds])


def _mean_f1(mean_features: Float[np.ndarray, "*shape d"]) -> Float[np.ndarray, "*shape"]:
    """Returns 100 times the mean over splits of F1 = 2 TP / (2 TP + FP + FN).

    As in the official program, F1 is 0 if the denominator is 0.
    """
    counts = mean_features.reshape(*mean_features.shape[:-1], len(pope.SPLITS), 3)
    true_positives, false_positives, false_negatives = np.moveaxis(counts, -1, 0)
    denominator = 2 * true_positives + false_positives + false_negatives
    f1 = np.where(denominator > 0, 2 * true_positives / denominator, 0.0)
    return 100 * f1.mean(axis=-1)


def _mme_features(outcomes: Outcomes) -> Float[np.ndarray, "u d"]:
    """Returns the numbers of images, correct answers and correct images by task."""
    columns = [np.ones(len(outcomes.value)), outcomes.value, outcomes.value == 2]
    return _one_hot_groups(outcomes, len(_MME_TASKS), columns)


def _mme_score(mean_features: Float[np.ndarray, "*shape d"]) -> Float[np.ndarray, "*shape"]:
    """Returns the sum over tasks of the accuracy of answers and the accuracy of images."""
    counts = mean_features.reshape(*mean_features.shape[:-1], len(_MME_TASKS), 3)
    images, correct_answers, correct_images = np.moveaxis(counts, -1, 0)
    return 100 * (correct_answers / (2 * images) + correct_images / images).sum(axis=-1)


_STATISTICS = {
    "mean": _Statistic(
        features=lambda outcomes: outcomes.value[:, None],
        score=lambda mean_features: 100 * mean_features[..., 0],
        is_correct=lambda outcomes: outcomes.value >= 0.5,
    ),
    "f1": _Statistic(
        features=_yes_no_features,
        score=_mean_f1,
        is_correct=lambda outcomes: outcomes.value <= _TRUE_POSITIVE,
    ),
    "mme": _Statistic(
        features=_mme_features,
        score=_mme_score,
        is_correct=lambda outcomes: outcomes.value == 2,
    ),
}


# Numbers of splits or tasks.
_NUM_GROUPS = {"mean": 1, "f1": len(pope.SPLITS), "mme": len(_MME_TASKS)}


def read_outcomes(
    benchmark: str,
    answers: Sequence[GivenAnswer],
    grades: Sequence[float | None],
    splits: dict[str, str],
) -> Outcomes | None:
    """Converts graded answers to outcomes.

    Args:
        benchmark: name of the benchmark.
        answers: the answers.
        grades: grade of each answer from 0 to 1; None for an answer without a known grade.
        splits: split of each question of POPE by id; not read for other benchmarks.

    Returns:
        The outcomes, sorted by id and prompt of the question so that rows with the same questions
        have the same order of units; None without graded answers.
    """
    units: dict[tuple, list[float]] = defaultdict(list)
    for index, (answer, grade) in enumerate(zip(answers, grades, strict=True)):
        if grade is None:
            continue
        group, key, value = 0, (answer.id, str(answer.fields.get("prompt")), index), grade
        if benchmark == "scienceqa" and IMAGE_MARK not in str(answer.fields.get("prompt")):
            continue  # the headline covers questions with an image
        if benchmark in ("mmbench", "mmbench_cn"):
            key = (f"{int(answer.id) % _ROTATION:09d}",)
        elif benchmark == "mme":
            task = answer.id.split("/")[0]
            group, key = _MME_TASKS.index(task), (answer.id,)
        elif benchmark == "pope":
            group, is_yes = [*pope.SPLITS].index(splits[answer.id]), pope.says_yes(answer.text)
            correct_outcome = _TRUE_POSITIVE if is_yes else _TRUE_NEGATIVE
            wrong_outcome = _FALSE_POSITIVE if is_yes else _FALSE_NEGATIVE
            value = float(correct_outcome if grade else wrong_outcome)
        units[(*key, group)].append(value)
    if not units:
        return None
    statistic = {"pope": "f1", "mme": "mme"}.get(benchmark, "mean")
    # Correct answers of an image are counted. A question of MMBench needs all rotations.
    combine = sum if statistic == "mme" else min
    sorted_keys = sorted(units)
    return Outcomes(
        statistic,
        np.array([key[-1] for key in sorted_keys]),
        np.array([combine(units[key]) for key in sorted_keys], float),
    )


def pack(outcomes: Outcomes) -> JsonObject:
    """Returns outcomes as a short JSON object: "statistic", and "units" with a word per unit."""
    groups, values = outcomes.group.tolist(), outcomes.value.tolist()
    pairs = zip(groups, values, strict=True)
    words = [f"{group}:{value:g}" if group else f"{value:g}" for group, value in pairs]
    return {"statistic": outcomes.statistic, "units": " ".join(words)}


def unpack(packed: Any) -> Outcomes:
    """Returns the outcomes of an object that `pack` returned.

    Raises:
        ValueError: the object has another form. The error may also be a KeyError, TypeError or
            AttributeError.
    """
    words = [word.rpartition(":") for word in packed["units"].split()]
    group = np.array([int(group or 0) for group, _, _ in words], int)
    value = np.array([float(value) for _, _, value in words], float)
    num_groups = _NUM_GROUPS[packed["statistic"]]
    if not len(words) or not np.isfinite(value).all() or not (group >= 0).all():
        raise ValueError("outcomes without finite values")
    if group.max() >= num_groups:
        raise ValueError("outcomes of unknown groups")
    return Outcomes(packed["statistic"], group, value)


def score_of(outcomes: Outcomes) -> float:
    """Returns the score of outcomes; NaN if it is not defined, see `Outcomes.score`."""
    return float(outcomes.score(outcomes.features().mean(axis=0, keepdims=True))[0])


def standard_error(outcomes: Outcomes) -> float | None:
    """Returns the standard error of a score over the sample of units.

    By the delta method, the error is the standard deviation of the units' influences / sqrt(u). An
    influence is the derivative of the score in the direction from the mean to the unit. The number
    of units in each split or task is fixed, so the mean influence of each group is subtracted
    first. For an accuracy of p percent, the error is sqrt(p (100 - p) / (u - 1)).

    Returns:
        The standard error, in the unit of the score; None if a group has fewer than two units.
    """
    features, group = outcomes.features(), outcomes.group
    group_sizes = np.bincount(group)
    if group_sizes.min() < 2:
        return None
    mean = features.mean(axis=0)
    directions = _STEP * (features - mean)
    influence = outcomes.score(mean + directions) - outcomes.score(mean - directions)
    influence /= 2 * _STEP
    deviation = influence - (np.bincount(group, influence) / group_sizes)[group]
    group_variances = np.bincount(group, deviation**2) / (group_sizes - 1)
    error = math.sqrt(group_sizes @ group_variances) / len(features)
    return error if math.isfinite(error) else None


def bootstrap(
    rows: Sequence[Outcomes], *, seed: int, num_resamples: int = NUM_RESAMPLES
) -> Float[np.ndarray, "rows r"]:
    """Computes the scores of table rows on r resamples of the units, drawn with replacement.

    All rows use the same resamples, so differences and ratios of rows are paired. Each split or
    task keeps its number of units.

    Args:
        rows: outcomes of rows on the same units, with the same statistic.
        seed: seed of the resamples.
        num_resamples: r, the number of resamples.

    Returns:
        [rows, r] the scores; NaN if the score is not defined, see `Outcomes.score`.
    """
    features = np.stack([row.features() for row in rows], axis=1)
    num_units, num_rows, width = features.shape
    flat_features = features.reshape(num_units, num_rows * width)
    group = rows[0].group
    units_by_group = np.argsort(group, kind="stable")
    group_size = np.bincount(group)[group[units_by_group]]
    group_start = np.searchsorted(group[units_by_group], group[units_by_group])
    rng = np.random.default_rng(seed)
    block_length = max(1, _BLOCK_SIZE // num_units)
    blocks = []
    for start in range(0, num_resamples, block_length):
        length = min(block_length, num_resamples - start)
        # Each unit is replaced by a unit of its group.
        offset = (rng.random((length, num_units)) * group_size).astype(int)
        drawn_units = units_by_group[group_start + offset]
        # Adding a multiple of u per resample makes one `bincount` count the units of all resamples.
        drawn_units += num_units * np.arange(length)[:, None]
        counts = np.bincount(drawn_units.ravel(), minlength=length * num_units)
        means = counts.reshape(length, num_units) @ flat_features / num_units
        blocks.append(rows[0].score(means.reshape(length, num_rows, width)))
    return np.concatenate(blocks).T


class Interval(NamedTuple):
    """The distribution of a figure over bootstrap resamples.

    Attributes:
        low: 2.5 % quantile.
        high: 97.5 % quantile.
        standard_error: standard deviation.
    """

    low: float
    high: float
    standard_error: float


def summarize(figures: Float[np.ndarray, "r"]) -> Interval | None:
    """Returns the interval of a figure, given its values on resamples.

    Resamples without a finite value, such as a ratio to a score of 0, are left out.

    Returns:
        The interval; None if fewer than half of the resamples have a value.
    """
    finite_figures = figures[np.isfinite(figures)]
    if 2 * len(finite_figures) < len(figures):
        return None
    low, high = np.quantile(finite_figures, (0.025, 0.975))
    return Interval(float(low), float(high), float(np.std(finite_figures)))


class McNemar(NamedTuple):
    """An exact McNemar test of a row and a reference row, such as the row of all tokens.

    Attributes:
        lost: number of units that only the reference row answers correctly.
        gained: number of units that only the row answers correctly.
        p: probability of a difference as large as lost - gained or larger, if both were equally
            likely.
    """

    lost: int
    gained: int
    p: float


def mcnemar_test(row: Outcomes, reference: Outcomes) -> McNemar:
    """Tests whether a row and a reference row differ in their number of correct units.

    Under the hypothesis, `lost` is binomial with lost + gained trials of probability 1/2. The test
    is two-sided: p = min(1, 2 P(X <= min(lost, gained))).

    Args:
        row: outcomes of the row.
        reference: outcomes of the row of all tokens, on the same units.
    """
    is_correct, is_reference_correct = row.is_correct(), reference.is_correct()
    lost = int(np.sum(is_reference_correct & ~is_correct))
    gained = int(np.sum(is_correct & ~is_reference_correct))
    trials = lost + gained
    # Logarithms of the binomial coefficients "trials choose k" for k = 0 to min(lost, gained).
    k = np.arange(min(lost, gained))
    log_coefficients = np.concatenate([[0.0], np.cumsum(np.log(trials - k) - np.log(k + 1))])
    log_tail = np.logaddexp.reduce(log_coefficients) - trials * math.log(2)
    return McNemar(lost, gained, min(1.0, 2 * math.exp(log_tail)))
