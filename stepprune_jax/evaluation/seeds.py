"""Averages the scores of runs that differ only in their seed."""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from stepprune_jax.settings import is_number
from stepprune_jax.user_input import UserError

Score = Mapping[str, Any]  # result of `scores.score_file`
# Fields that are equal for scores that differ only in the seed. Runs of earlier versions lack the
# model and the conditions.
_EQUAL_FIELDS = (
    *("benchmark", "method", "mode", "budget", "num_tokens", "questions"),
    *("model", "conditions"),
)
# Figures that are averaged. "headline" also gets a standard deviation.
_MEAN_FIELDS = ("mean_k", "sd_k", "ms", "gflops", "hard")


def average_seeds(runs: Mapping[str, Sequence[Score]]) -> dict[str, list[Score]]:
    """Replaces complete scores that differ only in their seed by their average.

    Args:
        runs: results of `scores.score_file` by name of the run.

    Returns:
        The scores by run. An average belongs to the first of its runs. It also has "headlines", the
        averaged scores by seed, and has no standard error over questions. Scores without a seed are
        not averaged.

    Raises:
        UserError: two runs with one seed have different results.
    """
    groups: dict[tuple, list[tuple[str, Score]]] = defaultdict(list)
    averaged: dict[str, list[Score]] = {run: [] for run in runs}
    for run, scores in runs.items():
        for score in scores:
            is_complete = score["answered"] >= score["asked"] and score["headline"] is not None
            if is_complete:
                key = tuple(score.get(field) for field in _EQUAL_FIELDS)
                groups[key].append((run, score))
            else:
                averaged[run].append(score)
    for group in groups.values():
        first_run, first_score = group[0]
        seeds = {score["seed"] for _, score in group}
        results = {(score["headline"], score["mean_k"]) for _, score in group}
        if None not in seeds and len(seeds) > 1:
            averaged[first_run].append(_average(_by_seed(group)))
        elif len(results) == 1:
            averaged[first_run].append(first_score)
        else:
            if None not in seeds:
                _by_seed(group)  # raises an error if one seed has different scores
            for run, score in group:  # the table names each of these rows after its run
                averaged[run].append(score)
    return averaged


def _by_seed(group: Iterable[tuple[str, Score]]) -> dict[int, Score]:
    """Returns the scores of a group by seed.

    Args:
        group: pairs (name of the run, score).

    Raises:
        UserError: two scores of one seed differ.
    """
    run_of_seed: dict[int, str] = {}
    scores: dict[int, Score] = {}
    for run, score in group:
        seed = score["seed"]
        if seed in scores and scores[seed]["headline"] != score["headline"]:
            raise UserError(
                f"{score['method']} of {run_of_seed[seed]} and of {run} have seed {seed} and "
                f"different scores on {score['benchmark']} ({scores[seed]['headline']:.2f} and "
                f"{score['headline']:.2f}): they differ in more than the seed; leave one run out"
            )
        run_of_seed.setdefault(seed, run)
        scores.setdefault(seed, score)
    return scores


def _average(scores: Mapping[int, Score]) -> Score:
    """Returns the average of scores, which are given by seed."""
    first_score = next(iter(scores.values()))
    average = {
        name: value
        for name, value in first_score.items()
        if name not in ("standard_error", "outcomes", "category_errors")
    }
    headlines = {seed: score["headline"] for seed, score in sorted(scores.items())}
    average |= {"headline": float(np.mean([*headlines.values()])), "headlines": headlines}
    for field in _MEAN_FIELDS:
        values = [value for score in scores.values() if (value := score.get(field)) is not None]
        if len(values) == len(scores):
            average[field] = float(np.mean(values))
    average["parts"] = _average_parts([score.get("parts", {}) for score in scores.values()])
    return average


def _average_parts(parts: Sequence[Any]) -> Any:
    """Returns the mean of nested numbers, such as the accuracy of each category.

    Args:
        parts: numbers, or objects of numbers and objects, of each seed. A number that some seed
            lacks is left out.
    """
    if all(isinstance(part, dict) for part in parts):
        shared_names = [name for name in parts[0] if all(name in part for part in parts)]
        return {name: _average_parts([part[name] for part in parts]) for name in shared_names}
    return float(np.mean(parts)) if all(map(is_number, parts)) else None


def sample_deviation(values: Sequence[float]) -> float:
    """Returns the standard deviation of at least two values, with divisor n - 1."""
    return float(np.std(values, ddof=1))
