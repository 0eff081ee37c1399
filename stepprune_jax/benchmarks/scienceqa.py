"""ScienceQA: questions of school science with two to five choices, about half with an image.

The figure in papers is the accuracy on questions with an image ("SQA", "ScienceQA-IMG").
"""

import re
from collections.abc import Callable, Collection, Iterator
from functools import partial
from pathlib import Path
from typing import NamedTuple

from stepprune_jax.benchmarks import layout
from stepprune_jax.benchmarks.answers import GivenAnswer, latest, read_answers
from stepprune_jax.benchmarks.benchmark import Benchmark, Score, worth_by_id
from stepprune_jax.benchmarks.questions import IMAGE_MARK, OPTION_LETTER, BenchmarkQuestion
from stepprune_jax.data.json_files import field, identity, read_json_list, read_json_object, words
from stepprune_jax.settings import is_count
from stepprune_jax.user_input import UserError

LETTERS = "ABCDE"
QUESTIONS = 4241
WITH_IMAGE = 2017
_SOURCE = "github.com/lupantech/ScienceQA, folder data/scienceqa"
# The official pattern requires one more character after the letter, of any kind.
_SENTENCE = re.compile("The answer is ([A-Z]).")


class Problem(NamedTuple):
    """The letter of a question's correct choice, and whether the question has an image."""

    answer: str
    has_image: bool


def read_list(path: Path, images: Path) -> Iterator[BenchmarkQuestion]:
    """Reads LLaVA's list.

    The recorded prompt of a question with an image has the image mark, by which `score` tells them
    apart.
    """
    for number, value in enumerate(read_json_list(path, "question"), start=1):
        where = f"{path}: question {number}"
        with layout.expected(where, "id and conversations, whose first one has a value"):
            identity(value, "id", where)
            said = words(value["conversations"][0], "value", where)
            text = said.replace(IMAGE_MARK, "").strip() + OPTION_LETTER
            image = words(value, "image", where) if "image" in value else None
        if image is None:
            yield BenchmarkQuestion(value["id"], text, text, None)
        else:
            prompt = f"{IMAGE_MARK}\n{text}"
            yield BenchmarkQuestion(value["id"], text, prompt, images / image)


def letter(text: str) -> str | None:
    """Finds the option letter of an answer as LLaVA's program does, or None.

    The answer is exactly one of A to E; or starts with one, a stop and a blank; or says "The answer
    is X", with one more character after X, exactly once (this X may be any capital).
    """
    if text in tuple(LETTERS):
        return text
    if text[:1] in tuple(LETTERS) and text[1:3] == ". ":
        return text[0]
    found = _SENTENCE.findall(text)
    return found[0] if len(found) == 1 else None


def score(root: str | Path, answers: str | Path) -> Score:
    """Scores answers to ScienceQA.

    A question counts as one with an image if the `prompt` of its answer holds `<image>`. The
    headline is the accuracy in percent over the answers with an image; an unanswered question is
    not among them. Parts: the accuracy over the whole test split, in which unanswered questions are
    wrong; the accuracy over the problems with an image likewise; how many questions there are, how
    many have no answer and how many answers no letter.
    """
    problems = _read_problems(Path(root) / "scienceqa")
    illustrated = [name for name, problem in problems.items() if problem.has_image]
    warnings = layout.size_warnings("test split of pid_splits.json", len(problems), QUESTIONS)
    warnings += layout.size_warnings("its problems with an image", len(illustrated), WITH_IMAGE)
    kept = latest(read_answers(answers), problems, warnings)
    seen = [name for name, answer in kept.items() if IMAGE_MARK in answer.prompt]
    if not seen:
        raise UserError(f"{answers}: no prompt holds <image>: were the images shown?")
    differ = set(seen) ^ {name for name in illustrated if name in kept}
    if differ:
        warnings.append(
            f"{len(differ):,} answers have <image> in the prompt but no image in problems.json, "
            f"or the reverse, such as {min(differ)!r}"
        )
    letters = {name: letter(answer.text) for name, answer in kept.items()}
    right = {name for name, found in letters.items() if found == problems[name].answer}
    parts = {
        "accuracy_all": _percent(right, problems),
        "accuracy_problems_with_image": _percent(right, illustrated),
        "questions": len(problems),
        "answered": len(kept),
        "answered_with_image": len(seen),
        "problems_with_image": len(illustrated),
        "without_letter": sum(found is None for found in letters.values()),
    }
    return Score(_percent(right, seen), parts, warnings)


def _worth(root: Path) -> Callable[[GivenAnswer], float | None]:
    """Grades an answer as right or wrong; see `Benchmark.worth`."""
    problems = _read_problems(Path(root) / "scienceqa")
    return worth_by_id(problems, lambda text, problem: letter(text) == problem.answer)


def _percent(right: set[str], names: Collection[str]) -> float:
    """Returns the share of these questions that are right in percent; 0 of none."""
    return 100 * len(right.intersection(names)) / max(len(names), 1)


def _is_one(numbers: range, value: object) -> bool:
    return is_count(value, 0) and value in numbers


def _read_problems(folder: Path) -> dict[str, Problem]:
    """Reads the problems of the test split, in its order."""
    splits, table = (
        layout.file(folder / name, _SOURCE) for name in ("pid_splits.json", "problems.json")
    )
    values, problems = read_json_object(table), {}
    for _, name in layout.records(read_json_object(splits), "test", splits):
        where = f"{table}: problem {name!r}"
        with layout.expected(where, "choices, answer and image"):
            value = values[str(name)]
            numbers = range(len(LETTERS[: len(value["choices"])]))
            expected = f"the number of a choice, below {len(numbers)}"
            answer = field(value, "answer", where, partial(_is_one, numbers), expected)
            problems[str(name)] = Problem(LETTERS[answer], value.get("image") is not None)
    return problems


BENCHMARK = Benchmark(
    name="scienceqa",
    title="ScienceQA-IMG",
    headline="accuracy on the answers with an image, in percent",
    question_files=("scienceqa/llava_test_CQM-A.json",),
    read=read_list,
    images="scienceqa/images/test",
    image_source="the download script of github.com/lupantech/ScienceQA",
    max_new_tokens=1024,
    score=score,
    worth=_worth,
)
