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

    Args:
        path: the question file.
        images: folder of the images.

    Yields:
        The questions. If a question has an image, its stored prompt contains the image mark, by
        which `score` recognizes such questions.
    """
    for number, record in enumerate(read_json_list(path, "question"), start=1):
        place = f"{path}: question {number}"
        with layout.refuse_malformed(place, "id and conversations, whose first one has a value"):
            identity(record, "id", place)
            message = words(record["conversations"][0], "value", place)
            text = message.replace(IMAGE_MARK, "").strip() + OPTION_LETTER
            image = words(record, "image", place) if "image" in record else None
        if image is None:
            yield BenchmarkQuestion(record["id"], text, text, None)
        else:
            prompt = f"{IMAGE_MARK}\n{text}"
            yield BenchmarkQuestion(record["id"], text, prompt, images / image)


def parse_letter(text: str) -> str | None:
    """Parses the option letter of an answer as LLaVA's program does.

    Three forms are accepted:

    1. A letter from A to E.
    2. A letter from A to E, a full stop, a blank, and any text.
    3. Any text that contains exactly one "The answer is X", followed by another character, where X
       is any capital letter.

    Args:
        text: the answer.

    Returns:
        The letter, or None for a text of another form.
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
    image_problem_ids = {name for name, problem in problems.items() if problem.has_image}
    warnings = layout.size_warnings("test split of pid_splits.json", len(problems), QUESTIONS)
    warnings += layout.size_warnings(
        "its problems with an image", len(image_problem_ids), WITH_IMAGE
    )
    answer_of = latest_answers(read_answers(answers), problems, warnings)
    image_answer_ids = [name for name, answer in answer_of.items() if IMAGE_MARK in answer.prompt]
    if not image_answer_ids:
        raise UserError(f"{answers}: no prompt holds <image>: were the images shown?")
    mismatched_ids = {*image_answer_ids} ^ (image_problem_ids & answer_of.keys())
    if mismatched_ids:
        warnings.append(
            f"{len(mismatched_ids):,} answers have <image> in the prompt but no image in "
            f"problems.json, or the reverse, such as {min(mismatched_ids)!r}"
        )
    letters = {name: parse_letter(answer.text) for name, answer in answer_of.items()}
    correct_ids = {name for name, letter in letters.items() if letter == problems[name].answer}
    parts = {
        "accuracy_all": _percent_correct(correct_ids, problems),
        "accuracy_problems_with_image": _percent_correct(correct_ids, image_problem_ids),
        "questions": len(problems),
        "answered": len(answer_of),
        "answered_with_image": len(image_answer_ids),
        "problems_with_image": len(image_problem_ids),
        "without_letter": sum(letter is None for letter in letters.values()),
    }
    return Score(_percent_correct(correct_ids, image_answer_ids), parts, warnings)


def _make_grader(root: Path) -> Callable[[GivenAnswer], float | None]:
    """Grades an answer as right or wrong; see `Benchmark.make_grader`."""
    problems = _read_problems(Path(root) / "scienceqa")
    return grade_by_id(problems, lambda text, problem: parse_letter(text) == problem.answer)


def _percent_correct(correct_ids: set[str], ids: Collection[str]) -> float:
    """Returns the percentage of `ids` that are in `correct_ids`; 0 if `ids` is empty."""
    return 100 * len(correct_ids.intersection(ids)) / max(len(ids), 1)


def _is_index(num_choices: int, value: object) -> bool:
    """Returns whether a JSON value is the index of one of `num_choices` choices."""
    return is_count(value, 0) and value in range(num_choices)


def _read_problems(folder: Path) -> dict[str, Problem]:
    """Reads the problems of the test split by id, in the order of the split.

    Args:
        folder: folder with the official files pid_splits.json and problems.json.
    """
    splits_file, problems_file = (
        layout.require_file(folder / name, _SOURCE) for name in ("pid_splits.json", "problems.json")
    )
    records, problems = read_json_object(problems_file), {}
    for _, problem_id in layout.list_records(read_json_object(splits_file), "test", splits_file):
        place = f"{problems_file}: problem {problem_id!r}"
        with layout.refuse_malformed(place, "choices, answer and image"):
            record = records[str(problem_id)]
            num_choices = min(len(record["choices"]), len(LETTERS))
            expected = f"the number of a choice, below {num_choices}"
            answer = field(record, "answer", place, partial(_is_index, num_choices), expected)
            problems[str(problem_id)] = Problem(LETTERS[answer], record.get("image") is not None)
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
