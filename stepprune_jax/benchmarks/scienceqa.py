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

    The recorded prompt of a question with an image contains the image mark, so that `score` can
    tell which questions have an image.
    """
    for number, value in enumerate(read_json_list(path, "question"), start=1):
        where = f"{path}: question {number}"
        with layout.expected(where, "id and conversations, whose first one has a value"):
            identity(value, "id", where)
            message = words(value["conversations"][0], "value", where)
            text = message.replace(IMAGE_MARK, "").strip() + OPTION_LETTER
            image = words(value, "image", where) if "image" in value else None
        if image is None:
            yield BenchmarkQuestion(value["id"], text, text, None)
        else:
            prompt = f"{IMAGE_MARK}\n{text}"
            yield BenchmarkQuestion(value["id"], text, prompt, images / image)


def letter(text: str) -> str | None:
    """Finds the option letter of an answer as LLaVA's program does, or None.

    Three forms have a letter: exactly one of A to E; a text that starts with one of them, a full
    stop and a blank; a text that contains "The answer is X" and one more character exactly once,
    where X may be any capital letter.
    """
    if text in tuple(LETTERS):
        return text
    if text[:1] in tuple(LETTERS) and text[1:3] == ". ":
        return text[0]
    letters = _SENTENCE.findall(text)
    return letters[0] if len(letters) == 1 else None


def score(root: str | Path, answers: str | Path) -> Score:
    """Scores answers to ScienceQA.

    A question has an image if the `prompt` of its answer contains `<image>`. The headline is the
    accuracy in percent over the answers with an image; unanswered questions do not count. Parts:
    the accuracy over all problems of the test split and over the problems with an image, where an
    unanswered question is wrong; the numbers of questions, of answered questions, of answers with
    an image, of problems with an image, and of answers without a letter.
    """
    problems = _read_problems(Path(root) / "scienceqa")
    illustrated = [name for name, problem in problems.items() if problem.has_image]
    warnings = layout.size_warnings("test split of pid_splits.json", len(problems), QUESTIONS)
    warnings += layout.size_warnings("its problems with an image", len(illustrated), WITH_IMAGE)
    kept = latest(read_answers(answers), problems, warnings)
    with_image = [name for name, answer in kept.items() if IMAGE_MARK in answer.prompt]
    if not with_image:
        raise UserError(f"{answers}: no prompt holds <image>: were the images shown?")
    differ = set(with_image) ^ {name for name in illustrated if name in kept}
    if differ:
        warnings.append(
            f"{len(differ):,} answers have <image> in the prompt but no image in problems.json, "
            f"or the reverse, such as {min(differ)!r}"
        )
    letters = {name: letter(answer.text) for name, answer in kept.items()}
    correct = {name for name, option in letters.items() if option == problems[name].answer}
    parts = {
        "accuracy_all": _percent(correct, problems),
        "accuracy_problems_with_image": _percent(correct, illustrated),
        "questions": len(problems),
        "answered": len(kept),
        "answered_with_image": len(with_image),
        "problems_with_image": len(illustrated),
        "without_letter": sum(option is None for option in letters.values()),
    }
    return Score(_percent(correct, with_image), parts, warnings)


def _worth(root: Path) -> Callable[[GivenAnswer], float | None]:
    """Grades an answer as right or wrong; see `Benchmark.worth`."""
    problems = _read_problems(Path(root) / "scienceqa")
    return worth_by_id(problems, lambda text, problem: letter(text) == problem.answer)


def _percent(correct: set[str], names: Collection[str]) -> float:
    """Returns the share of the named questions that are correct, in percent; 0 without names."""
    return 100 * len(correct.intersection(names)) / max(len(names), 1)


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
