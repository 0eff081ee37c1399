"""ScienceQA: questions of school science with two to five choices, about half with an image.

The figure in papers is the accuracy on questions with an image ("SQA", "ScienceQA-IMG").
"""

import re
from collections.abc import Callable, Collection, Iterator
from functools import partial
from pathlib import Path
from typing import NamedTuple

from stepprune_jax.benchmarks import layout
from stepprune_jax.benchmarks.answers import GivenAnswer, latest_answers, read_answers
from stepprune_jax.benchmarks.benchmark import Benchmark, Score, grade_by_id
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
    """A question of the test split.

    Attributes:
        answer: letter of the correct choice.
        has_image: whether the question has an image.
    """

    answer: str
    has_image: bool


def read_list(path: Path, images: Path) -> Iterator[BenchmarkQuestion]:
    """Reads LLaVA's question file.

    The stored prompt of a question with an image contains the image mark. `score` recognizes
    questions with an image by it.
    """
    for number, value in enumerate(read_json_list(path, "question"), start=1):
        place = f"{path}: question {number}"
        with layout.expected(place, "id and conversations, whose first one has a value"):
            identity(value, "id", place)
            message = words(value["conversations"][0], "value", place)
            text = message.replace(IMAGE_MARK, "").strip() + OPTION_LETTER
            image = words(value, "image", place) if "image" in value else None
        if image is None:
            yield BenchmarkQuestion(value["id"], text, text, None)
        else:
            prompt = f"{IMAGE_MARK}\n{text}"
            yield BenchmarkQuestion(value["id"], text, prompt, images / image)


def parse_letter(text: str) -> str | None:
    """Parses the option letter of an answer as LLaVA's program does.

    Three forms of text have a letter: a letter from A to E; a text that starts with such a letter,
    a full stop and a blank; and a text with exactly one "The answer is X" that is followed by
    another character, where X is any capital letter. Other texts return None.
    """
    if text in tuple(LETTERS):
        return text
    if text[:1] in tuple(LETTERS) and text[1:3] == ". ":
        return text[0]
    letters = _SENTENCE.findall(text)
    return letters[0] if len(letters) == 1 else None


def score(root: str | Path, answers: str | Path) -> Score:
    """Scores answers to ScienceQA.

    A question has an image if the `prompt` of its answer contains `<image>`.

    Args:
        root: folder of LLaVA's layout.
        answers: the answer file.

    Returns:
        The headline is the accuracy in percent over the answers with an image; unanswered questions
        do not count. Parts: the accuracy over all problems of the test split and over the problems
        with an image, which count unanswered questions as wrong; and the numbers of questions, of
        answered questions, of answers with an image, of problems with an image, and of answers
        without a letter.
    """
    problems = _read_problems(Path(root) / "scienceqa")
    image_problems = [name for name, problem in problems.items() if problem.has_image]
    warnings = layout.size_warnings("test split of pid_splits.json", len(problems), QUESTIONS)
    warnings += layout.size_warnings("its problems with an image", len(image_problems), WITH_IMAGE)
    answer_of = latest_answers(read_answers(answers), problems, warnings)
    with_image = [name for name, answer in answer_of.items() if IMAGE_MARK in answer.prompt]
    if not with_image:
        raise UserError(f"{answers}: no prompt holds <image>: were the images shown?")
    mismatches = set(with_image) ^ {name for name in image_problems if name in answer_of}
    if mismatches:
        warnings.append(
            f"{len(mismatches):,} answers have <image> in the prompt but no image in "
            f"problems.json, or the reverse, such as {min(mismatches)!r}"
        )
    letters = {name: parse_letter(answer.text) for name, answer in answer_of.items()}
    correct = {name for name, option in letters.items() if option == problems[name].answer}
    parts = {
        "accuracy_all": _percent(correct, problems),
        "accuracy_problems_with_image": _percent(correct, image_problems),
        "questions": len(problems),
        "answered": len(answer_of),
        "answered_with_image": len(with_image),
        "problems_with_image": len(image_problems),
        "without_letter": sum(option is None for option in letters.values()),
    }
    return Score(_percent(correct, with_image), parts, warnings)


def _make_grader(root: Path) -> Callable[[GivenAnswer], float | None]:
    """Grades an answer as right or wrong; see `Benchmark.make_grader`."""
    problems = _read_problems(Path(root) / "scienceqa")
    return grade_by_id(problems, lambda text, problem: parse_letter(text) == problem.answer)


def _percent(correct: set[str], names: Collection[str]) -> float:
    """Returns the percentage of `names` that are in `correct`; 0 for no names."""
    return 100 * len(correct.intersection(names)) / max(len(names), 1)


def _is_in_range(numbers: range, value: object) -> bool:
    return is_count(value, 0) and value in numbers


def _read_problems(folder: Path) -> dict[str, Problem]:
    """Reads the problems of the test split by id, in the order of the split."""
    splits, table = (
        layout.file(folder / name, _SOURCE) for name in ("pid_splits.json", "problems.json")
    )
    values, problems = read_json_object(table), {}
    for _, name in layout.records(read_json_object(splits), "test", splits):
        place = f"{table}: problem {name!r}"
        with layout.expected(place, "choices, answer and image"):
            value = values[str(name)]
            numbers = range(len(LETTERS[: len(value["choices"])]))
            expected = f"the number of a choice, below {len(numbers)}"
            answer = field(value, "answer", place, partial(_is_in_range, numbers), expected)
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
    make_grader=_make_grader,
)
