"""Scores the answer files of a run, and averages kept tokens, time and FLOPs over questions.

A score is a JSON object. The scores of a run are stored in its report, where tables read them.
"""

import contextlib
import json
from collections import defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Bool

from stepprune_jax.benchmarks import BENCHMARKS, folder, pope
from stepprune_jax.benchmarks.answer_files import BOUND, AnswerFile, digest
from stepprune_jax.benchmarks.answers import GivenAnswer, read_answers
from stepprune_jax.data.json_files import JsonObject, read_json_lines, read_json_list
from stepprune_jax.evaluation.names import ALL, DOWNSAMPLED
from stepprune_jax.evaluation.uncertainty import (
    Outcomes,
    pack,
    read_outcomes,
    score_of,
    standard_error,
    unpack,
)
from stepprune_jax.settings import is_count, is_number
from stepprune_jax.user_input import UserError

SCORES = "scores.json"
# Id and prompt of an answer, which together identify a question.
_QuestionKey = tuple[str, object]
# Official programs round some scores to two decimals.
_SCORE_TOLERANCE = 0.0051
# Fields that tables read, each with a check of its value. Users may edit or merge score files.
_FIELDS: dict[str, Callable[[Any], bool]] = {
    "benchmark": lambda value: value in BENCHMARKS,
    **dict.fromkeys(("method", "mode", "questions"), lambda value: isinstance(value, str)),
    "problem": lambda value: value is None or isinstance(value, str),
    "warnings": lambda value: isinstance(value, list) and all(isinstance(x, str) for x in value),
    "num_tokens": is_count,
    "budget": lambda value: value is None or is_count(value, 0),  # 0: without an image
    **dict.fromkeys(("asked", "answered"), lambda value: is_count(value, 0)),
    "seed": lambda value: value is None or is_count(value, 0),
    **dict.fromkeys(
        ("headline", "mean_k", "sd_k", "ms", "gflops"),
        lambda value: value is None or is_number(value),
    ),
}


class _Grader(NamedTuple):
    """The annotations of a benchmark. Built by `_open_grader`.

    Attributes:
        grade: grades an answer from 0 to 1, see `Benchmark.make_grader`.
        splits: split of each question of POPE by id; empty for other benchmarks.
        categories: category of each question of a data folder by id; empty for other benchmarks.
    """

    grade: Callable[[GivenAnswer], float | None]
    splits: dict[str, str]
    categories: dict[str, str]

    def outcomes(self, benchmark: str, answers: Sequence[GivenAnswer]) -> Outcomes | None:
        """Returns the outcomes of answers; None if the answers cannot be graded."""
        # The errors of malformed answers and annotations are reported by `Benchmark.score`.
        with contextlib.suppress(UserError, ValueError, KeyError):
            grades = [self.grade(answer) for answer in answers]
            return read_outcomes(benchmark, answers, grades, self.splits)
        return None

    def category_errors(self, benchmark: str, answers: Sequence[GivenAnswer]) -> JsonObject:
        """Returns the standard error of the score by category; empty without categories."""
        answers_by_category: dict[str, list[GivenAnswer]] = defaultdict(list)
        for answer in answers:
            if answer.id in self.categories:
                answers_by_category[self.categories[answer.id]].append(answer)
        errors = {}
        for category, category_answers in sorted(answers_by_category.items()):
            outcomes = self.outcomes(benchmark, category_answers)
            errors[category] = None if outcomes is None else standard_error(outcomes)
        return errors


def _open_grader(benchmark: str, root: Path) -> _Grader | None:
    """Reads the annotations of a benchmark; None if they are missing or malformed.

    Args:
        benchmark: name of the benchmark.
        root: folder of the benchmark's annotations.
    """
    with contextlib.suppress(OSError, UserError):  # `Benchmark.score` reports these errors
        splits = pope.read_splits(root) if benchmark == pope.BENCHMARK.name else {}
        categories = _read_categories(root) if benchmark == folder.BENCHMARK.name else {}
        return _Grader(BENCHMARKS[benchmark].make_grader(root), splits, categories)
    return None


def _read_categories(root: Path) -> dict[str, str]:
    """Returns the category of each question of a data folder by id, if the question has one."""
    records = read_json_lines(root / folder.QUESTIONS)
    return {
        str(value.get("question_id")): str(value["category"])
        for _, value in records
        if "category" in value
    }


def score_files(
    files: Sequence[AnswerFile], root: Path, seed_of: Callable[[AnswerFile], int | None]
) -> dict[Path, JsonObject]:
    """Scores the answer files of one benchmark.

    The files of an interrupted run answer different numbers of questions. Unfinished files are
    scored on the questions that all of them have answered, so that their scores are comparable.

    Args:
        files: the files of the benchmark.
        root: folder of the benchmark's annotations.
        seed_of: returns the seed of a file's row, see `score_file`.

    Returns:
        The score by path of the file, see `score_file`. The score of an unfinished file also has
        "scored", the number of questions that its headline covers.
    """
    if not files:
        return {}
    grader = _open_grader(files[0].provenance.benchmark, root)
    scores = {file.path: score_file(file, root, seed_of(file), grader) for file in files}
    answers_by_path = {}
    for file in files:
        if grader is not None and 0 < scores[file.path]["answered"] < file.provenance.asked:
            answers = read_answers(file.path, broken=[])
            answers_by_path[file.path] = {_question_key(answer): answer for answer in answers}
    if grader is None or not answers_by_path:
        return scores
    shared_keys = set.intersection(*(set(answers) for answers in answers_by_path.values()))
    for path, answers in answers_by_path.items():
        score = scores[path]
        shared_answers = [answers[key] for key in shared_keys]
        outcomes = grader.outcomes(score["benchmark"], shared_answers)
        if outcomes is not None and outcomes.has_all_groups:
            score["problem"] += f"; the score covers the first {len(shared_keys):,}"
            score |= {"headline": score_of(outcomes), "scored": len(shared_keys)}
            score |= _uncertainty(outcomes)
    return scores


def _question_key(answer: GivenAnswer) -> _QuestionKey:
    """Returns the id and the prompt of an answer, which identify its question."""
    return answer.id, answer.fields.get("prompt")


def _uncertainty(outcomes: Outcomes) -> JsonObject:
    """Returns the fields of a score that tables need for errors, intervals and tests."""
    return {"standard_error": standard_error(outcomes), "outcomes": pack(outcomes)}


def score_file(
    file: AnswerFile, root: Path, seed: int | None, grader: _Grader | None = None
) -> JsonObject:
    """Scores an answer file, and averages kept tokens, time and FLOPs over its questions.

    Args:
        file: the answer file.
        root: folder of the benchmark's annotations.
        seed: seed of a random method, or of the training of a policy; None for other methods.
        grader: the annotations, for the standard error; None leaves the error out.

    Returns:
        A JSON object with these fields, among others. "headline" is the score that papers report,
        or None with the reason in "problem". "standard_error" is its error over the sample of
        questions, and "outcomes" are the results that it follows from, see `uncertainty.pack`; both
        are absent where they are not known. "category_errors" are the standard errors by category
        of a data folder with categories. "mean_k", "sd_k", "min_k" and "max_k" are statistics
        of kept tokens, and "gflops" is a mean, over the questions with an image. "ms" is the mean
        time of all questions. A figure is None if no answer has it. "at_floor" and "at_cap" are the
        fractions of questions whose learned stop kept its minimum or maximum (T_max) of tokens;
        both are absent if both are 0. "conditions" is equal for rows that differ only in their seed
        or in the training seed of their policy.
    """
    provenance, benchmark = file.provenance, BENCHMARKS[file.provenance.benchmark]
    answers, problem = [], None
    score: JsonObject = {"headline": None, "parts": {}, "warnings": []}
    try:
        # The last line is incomplete while a run writes the file. The reader refuses a file without
        # any complete line.
        if b"\n" in file.path.read_bytes():
            answers = read_answers(file.path, broken=[])
        if len(answers) >= provenance.asked:
            score = benchmark.score(root, file.path)._asdict()
        else:
            problem = f"{len(answers):,} of {provenance.asked:,} questions answered so far"
    except (OSError, UserError) as error:  # another program may have written a line
        problem = str(error)
    if grader is not None and score["headline"] is not None:
        outcomes = grader.outcomes(provenance.benchmark, answers)
        # A file of another program may repeat or omit questions. Its score then differs.
        if outcomes is not None and abs(score_of(outcomes) - score["headline"]) < _SCORE_TOLERANCE:
            score |= _uncertainty(outcomes)
            if errors := grader.category_errors(provenance.benchmark, answers):
                score["category_errors"] = errors
    row_settings = {
        name: value for name, value in provenance.made.items() if name not in ("seed", "policy")
    }
    return {
        "benchmark": provenance.benchmark,
        "method": provenance.method,
        "mode": provenance.mode,
        "budget": provenance.budget,
        "num_tokens": provenance.num_tokens,
        "model": provenance.model,
        "questions": provenance.questions,
        "conditions": digest([json.dumps(row_settings, sort_keys=True)]),
        "seed": seed,
        "asked": provenance.asked,
        "answered": len(answers),
        **score,
        "problem": problem,
        **_summarize(answers),
    }


def score_hard(files: Sequence[AnswerFile], root: Path) -> dict[Path, JsonObject]:
    """Scores complete answer files of a benchmark on hard questions only.

    A question is hard for a budget if its answer is correct with all tokens, and wrong if the image
    is downsampled to the budget. A question that a coarser image also answers does not distinguish
    pruning methods. Follows VTC-Bench (https://arxiv.org/abs/2510.07143).

    Args:
        files: the files, among them one of all tokens and some of `DOWNSAMPLED`.
        root: folder of the benchmark's annotations.

    Returns:
        By path of the file, "hard", the percentage of correct answers to hard questions, and
        "hard_questions", the number of hard questions. A file is omitted if its budget has no hard
        questions, or if it cannot be graded.
    """
    correct_by_path: dict[Path, dict[_QuestionKey, bool]] = {}
    for file in files:
        with contextlib.suppress(OSError, ValueError):  # `score_file` reports these errors
            correct_by_path[file.path] = _grade_questions(file, root)
    correct_by_row = {
        (file.provenance.method, file.provenance.budget): correct_by_path.get(file.path, {})
        for file in files
    }
    all_tokens_rows = [correct for (method, _), correct in correct_by_row.items() if method == ALL]
    correct_with_all_tokens = all_tokens_rows[0] if all_tokens_rows else {}
    scores: dict[Path, JsonObject] = {}
    for file in files:
        correct_downsampled = correct_by_row.get((DOWNSAMPLED, file.provenance.budget), {})
        hard_keys = [
            key
            for key, is_correct in correct_with_all_tokens.items()
            # A question that the downsampled row lacks is not hard.
            if is_correct and not correct_downsampled.get(key, True)
        ]
        if hard_keys and file.path in correct_by_path:
            num_correct = sum(correct_by_path[file.path].get(key, False) for key in hard_keys)
            percentage = round(100 * num_correct / len(hard_keys), 2)
            scores[file.path] = {"hard": percentage, "hard_questions": len(hard_keys)}
    return scores


def _grade_questions(file: AnswerFile, root: Path) -> dict[_QuestionKey, bool]:
    """Returns whether each question of a file is answered correctly.

    Questions with an unknown correct answer are omitted. A fractional grade counts as correct from
    0.5 on.

    Args:
        file: the answer file.
        root: folder of the benchmark's annotations.

    Returns:
        Whether the answer is correct, by id and prompt of the question.

    Raises:
        OSError: a file is missing.
        UserError: a file is malformed.
    """
    grades = BENCHMARKS[file.provenance.benchmark].judge(root, file.path)
    answers = read_answers(file.path)
    return {
        _question_key(answer): grade >= 0.5
        for answer, grade in zip(answers, grades, strict=True)
        if grade is not None
    }


def about_images(answers: Sequence[GivenAnswer]) -> Bool[np.ndarray, "q"]:
    """Returns a mask of the answers to questions with an image.

    The evaluation records FLOPs for questions with an image only. If no answer has FLOPs, another
    program wrote the file, and the mask is all True.
    """
    has_flops = np.array(["gflops" in answer.fields for answer in answers], bool)
    return has_flops | ~has_flops.any()


def _summarize(answers: Sequence[GivenAnswer]) -> dict[str, float | int | None]:
    """Computes statistics of kept tokens, and the means of time and FLOPs.

    Args:
        answers: the answers of a file; may be empty.

    Returns:
        The fields "mean_k", "sd_k", "min_k", "max_k", "ms", "gflops", "at_floor" and "at_cap", as
        described in `score_file`.
    """
    if not answers:
        return dict.fromkeys(("mean_k", "sd_k", "min_k", "max_k", "ms", "gflops"))
    has_image = about_images(answers)
    # Another program may have written the file, so a count may be missing.
    counts = [answer.fields.get("kept") for answer in answers]
    num_kept = np.array([count if is_count(count, 0) else 0 for count in counts])[has_image]
    bounds = np.array([str(answer.fields.get(BOUND)) for answer in answers])[has_image]
    at_bounds = {
        "at_floor": float(np.mean(bounds == "minimum")),
        "at_cap": float(np.mean(bounds == "T_max")),
    }
    times = [answer.fields["ms"] for answer in answers if is_number(answer.fields.get("ms"))]
    gflops = [
        answer.fields["gflops"] for answer in answers if is_number(answer.fields.get("gflops"))
    ]
    return {
        "mean_k": float(num_kept.mean()),
        "sd_k": float(num_kept.std()),
        "min_k": int(num_kept.min()),
        "max_k": int(num_kept.max()),
        "ms": float(np.mean(times)) if times else None,
        "gflops": float(np.mean(gflops)) if gflops else None,
        **(at_bounds if any(at_bounds.values()) else {}),
    }


def _is_score(score: JsonObject) -> bool:
    """Returns whether an object has the fields that tables read, with valid values."""
    if not all(is_valid(score[name]) for name, is_valid in _FIELDS.items()):
        return False
    if "headlines" in score:  # a field of averages over seeds, which files do not have
        return False
    # Only some runs have these fields: runs that downsample, that have a learned stop, that were
    # stopped, or whose answers can be graded.
    optional_fields = ("hard", "hard_questions", "at_floor", "at_cap", "scored")
    if not all(is_number(score.get(name, 0)) for name in optional_fields):
        return False
    if not all(isinstance(score.get(name, ""), str) for name in ("conditions", "model")):
        return False
    error, parts = score.get("standard_error"), score.get("parts", {})
    if not (error is None or is_number(error)) or not isinstance(parts, dict):
        return False
    if not all(x is None or is_number(x) for x in score.get("category_errors", {}).values()):
        return False
    if "outcomes" in score:
        unpack(score["outcomes"])  # raises an error for an object of another form
    return (score["mean_k"] is None) == (score["sd_k"] is None)


def read_scores(workdir: str | Path) -> list[JsonObject]:
    """Reads the scores of a run from its report.

    Args:
        workdir: folder of the run.

    Returns:
        One object per answer file, as `score_file` returns it.

    Raises:
        FileNotFoundError: the run has no scores yet.
        UserError: the file is not a list of scores.
    """
    path = Path(workdir) / "report" / SCORES
    if not path.is_file():
        raise FileNotFoundError(f"no file {path}: run eval.py with this --workdir first")
    remedy = "write it again with eval.py --stages score"
    try:
        scores = read_json_list(path, "score")
    except (UserError, ValueError) as error:
        raise UserError(f"{path} is not a list of scores: {remedy}") from error
    for index, score in enumerate(scores):
        # A value that is not an object, or that lacks a field, makes `_is_score` raise.
        try:
            is_valid = _is_score(score)
        except (ValueError, AttributeError, KeyError, TypeError):
            is_valid = False
        if not is_valid:
            method = score.get("method") if isinstance(score, dict) else None
            raise UserError(
                f"{path}: score {index} ({method}) is not a score as eval.py writes it: {remedy}"
            )
    return scores
