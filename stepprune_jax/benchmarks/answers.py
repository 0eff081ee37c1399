"""Reads LLaVA's answer files: one JSON object per line, in the order of the file.

The relevant fields are `question_id`, `text` (the answer) and `prompt` (the question as the model
saw it, without the conversation template). Other programs may have written the file.
"""

from collections.abc import Collection, Iterable
from pathlib import Path
from typing import NamedTuple

from stepprune_jax.data.json_files import JsonObject, field, identity, read_json_lines, words
from stepprune_jax.user_input import UserError


class GivenAnswer(NamedTuple):
    """A line of an answer file.

    Attributes:
        place: file and line, for messages.
        id: the field `question_id` as text.
        text: the answer.
        fields: all fields of the line.
    """

    place: str
    id: str
    text: str
    fields: JsonObject

    @property
    def prompt(self) -> str:
        """The question as stored in the line; raises a UserError if the line has no prompt."""
        return words(self.fields, "prompt", self.place)


def read_answers(file: str | Path, broken: list[str] | None = None) -> list[GivenAnswer]:
    """Reads an answer file.

    Args:
        file: path of the file.
        broken: output list for messages about lines that are not JSON. Such lines are skipped. If
            None, such a line is an error.

    Returns:
        The lines in the order of the file.

    Raises:
        FileNotFoundError: the file does not exist.
        UserError: a line is not JSON, or lacks `question_id` or `text`.
    """
    answers = []
    for place, record in read_json_lines(file, broken):
        question_id = identity(record, "question_id", place)
        text = field(record, "text", place, lambda value: isinstance(value, str), "an answer")
        answers.append(GivenAnswer(place, question_id, text, record))
    return answers


def latest_answers(
    answers: Iterable[GivenAnswer],
    question_ids: Iterable[str],
    warnings: list[str],
    remedy: str = "",
) -> dict[str, GivenAnswer]:
    """Returns the last answer to each question of a benchmark.

    Args:
        answers: the answers in the order of the file.
        question_ids: ids of the benchmark's questions.
        warnings: output list for warnings about repeated, unknown and missing answers.
        remedy: advice at the end of the error message.

    Returns:
        The answers by question id, in the order of `question_ids`. Unanswered questions are
        omitted.

    Raises:
        UserError: none of the answers is to one of the questions.
    """
    question_ids = list(dict.fromkeys(question_ids))
    # Starting with all ids gives the result the order of `question_ids`.
    last_answers: dict[str, GivenAnswer | None] = dict.fromkeys(question_ids)
    num_repeated, unknown_ids = 0, []
    for answer in answers:
        if answer.id not in last_answers:
            unknown_ids.append(answer.id)
            continue
        num_repeated += last_answers[answer.id] is not None
        last_answers[answer.id] = answer
    answer_of = {
        question_id: answer for question_id, answer in last_answers.items() if answer is not None
    }
    if not answer_of:
        example = f", such as {question_ids[0]!r}" if question_ids else ""
        raise UserError(f"no answer is to a question of this benchmark{example}{remedy}")
    if num_repeated:
        warnings.append(f"{num_repeated:,} questions answered repeatedly: the last answer counts")
    if unknown_ids:
        warnings.append(
            f"{len(unknown_ids):,} answers to unknown questions ignored, such as {unknown_ids[0]!r}"
        )
    missing_ids = [question_id for question_id in question_ids if question_id not in answer_of]
    if missing_ids:
        warnings.append(
            f"{len(missing_ids):,} of {len(question_ids):,} questions have no answer, such as "
            f"{missing_ids[0]!r}"
        )
    return answer_of


def require_all(
    file: str | Path,
    question_ids: Collection[str],
    answered_ids: Collection[str],
    num_unknown_lines: int = 0,
) -> None:
    """Checks that all questions and no other questions are answered, as official programs do.

    Args:
        file: the answer file, for the message.
        question_ids: ids of the benchmark's questions.
        answered_ids: ids of the answered questions, a subset of `question_ids`.
        num_unknown_lines: number of lines that answer unknown questions.

    Raises:
        UserError: a question has no answer, or a line answers an unknown question.
    """
    num_missing = len(question_ids) - len(answered_ids)
    if num_missing > 0 or num_unknown_lines:
        missing_ids = (name for name in question_ids if name not in answered_ids)
        example = next((f", such as {name!r}" for name in missing_ids), "")
        raise UserError(
            f"{file}: {num_missing:,} of {len(question_ids):,} questions have no answer{example}, "
            f"and {num_unknown_lines:,} lines answer other questions: the official program refuses "
            "this; skip them with --missing leave-out"
        )
