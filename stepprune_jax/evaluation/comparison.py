"""Compares rows of a table with the row of all tokens, on the same questions."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Float

from stepprune_jax.evaluation.uncertainty import (
    Interval,
    McNemar,
    Outcomes,
    bootstrap,
    mcnemar_test,
    summarize,
    unpack,
)

Score = Mapping[str, Any]  # result of `scores.score_file`
Resamples = Float[np.ndarray, "r"]


class Comparison(NamedTuple):
    """The comparison of a row with the row of all tokens. Built by `compare_rows`.

    Attributes:
        retention: paired interval of the average retention in percent; None if it is not known.
        image_gain: paired interval of the share of the image's gain in percent; None if it is not
            known.
        tests: McNemar's test by benchmark, for benchmarks with outcomes of both rows.
    """

    retention: Interval | None = None
    image_gain: Interval | None = None
    tests: Mapping[str, McNemar] = {}


class _Reference(NamedTuple):
    """Resampled scores of all rows on one benchmark, with the scores that they are compared with.

    Attributes:
        scores: [r] scores of each row on r resamples, by index of the row.
        unpruned: [r] scores with all tokens.
        blind: [r] scores without an image; None without this row.
    """

    scores: Mapping[int, Resamples]
    unpruned: Resamples
    blind: Resamples | None


def compare_rows(
    rows: Sequence[Mapping[str, Score]], unpruned: int | None, blind: int | None
) -> list[Comparison]:
    """Compares all rows with the row of all tokens, by a paired bootstrap over the questions.

    Args:
        rows: scores of each row by benchmark.
        unpruned: index of the row of all tokens; None without this row.
        blind: index of the row without an image; None without this row.

    Returns:
        One comparison per row. The comparison is empty for rows without outcomes, such as rows of
        earlier versions, and for the average over several seeds.
    """
    if unpruned is None:
        return [Comparison()] * len(rows)
    scored_benchmarks = [
        name for name, score in rows[unpruned].items() if score["headline"] is not None
    ]
    references: dict[str, _Reference] = {}
    tests: list[dict[str, McNemar]] = [{} for _ in rows]
    # A seed per benchmark makes the resamples of different benchmarks independent.
    for seed, name in enumerate(scored_benchmarks):
        outcomes = pair_outcomes(rows, unpruned, name)
        if not outcomes:
            continue
        for index, row_outcomes in outcomes.items():
            if index != unpruned:
                tests[index][name] = mcnemar_test(row_outcomes, outcomes[unpruned])
        resamples = dict(zip(outcomes, bootstrap([*outcomes.values()], seed=seed), strict=True))
        blind_scores = None if blind is None else resamples.get(blind)
        references[name] = _Reference(resamples, resamples[unpruned], blind_scores)
    if len(references) < len(scored_benchmarks):  # an average needs all benchmarks
        references = {}
    return [
        Comparison(*_intervals(index, [*references.values()]), row_tests)
        for index, row_tests in enumerate(tests)
    ]


def pair_outcomes(
    rows: Sequence[Mapping[str, Score]], reference_index: int, benchmark: str
) -> dict[int, Outcomes]:
    """Returns the outcomes on a benchmark by index of the row.

    Only rows whose score covers the units of the reference row are returned. The result is empty if
    the reference row has no outcomes.

    Args:
        rows: scores of each row by benchmark.
        reference_index: index of the row to compare all rows with.
        benchmark: name of the benchmark.
    """
    reference_score = rows[reference_index].get(benchmark, {})
    if "outcomes" not in reference_score:
        return {}
    reference = unpack(reference_score["outcomes"])
    paired = {}
    for index, scores in enumerate(rows):
        score = scores.get(benchmark, {})
        if "outcomes" in score and score.get("scored") == reference_score.get("scored"):
            outcomes = unpack(score["outcomes"])
            has_same_units = np.array_equal(outcomes.group, reference.group)
            if has_same_units and outcomes.statistic == reference.statistic:
                paired[index] = outcomes
    return paired


def _intervals(
    index: int, references: Sequence[_Reference]
) -> tuple[Interval | None, Interval | None]:
    """Returns the intervals of a row's average retention and of its share of the image's gain.

    Args:
        index: index of the row.
        references: resampled scores of each benchmark; empty if they are not known.

    Returns:
        A tuple (retention, image_gain). A figure is None if a benchmark lacks the row's outcomes.
    """
    if not references or not all(index in reference.scores for reference in references):
        return None, None
    retentions, gains = [], []
    with np.errstate(divide="ignore", invalid="ignore"):
        for scores, unpruned, blind in references:
            retentions.append(100 * scores[index] / unpruned)
            if blind is not None:
                gain = np.where(unpruned > blind, unpruned - blind, np.nan)
                gains.append(100 * (scores[index] - blind) / gain)
    has_all_gains = len(gains) == len(references)
    image_gain = summarize(np.mean(gains, axis=0)) if has_all_gains else None
    return summarize(np.mean(retentions, axis=0)), image_gain
