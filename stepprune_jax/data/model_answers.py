"""Replaces the answers of training conversations by answers of the frozen model."""

import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import Any

# Answer of a question before the frozen model has answered it: a row needs an answer to be checked.
PLACEHOLDER = "-"


def replace_answers(entries: Sequence[Any], answers: Mapping[tuple[int, int], str]) -> list[Any]:
    """Returns the entries of a training file with other answers.

    The entries need not have answers. Malformed entries are returned unchanged, so that parsing
    them reports their fault.

    Args:
        entries: values of the file's JSON list.
        answers: answers by index of the entry and of the question in the entry. A question without
            an answer here gets `PLACEHOLDER`. A question with an empty answer is left out.

    Returns:
        A list of the same length.
    """
    return [_replace(entry, index, answers) for index, entry in enumerate(entries)]


def answers_identity(answers: Mapping[tuple[int, int], str]) -> str:
    """Returns a hash of the answers, which does not depend on their order."""
    text = json.dumps(sorted(answers.items()))
    return hashlib.sha256(text.encode()).hexdigest()


def _replace(entry: Any, index: int, answers: Mapping[tuple[int, int], str]) -> Any:
    """Returns an entry with other answers; an entry that is malformed is returned unchanged."""
    messages = entry.get("conversations") if isinstance(entry, dict) else None
    if not isinstance(messages, list) or not all(map(_has_role, messages)):
        return entry
    questions = [message for message in messages if message["from"] == "human"]
    pairs: list[dict[str, Any]] = []
    for question_index, question in enumerate(questions):
        answer = answers.get((index, question_index), PLACEHOLDER)
        if answer:
            pairs += [question, {"from": "gpt", "value": answer}]
    # A first message of the assistant is dropped by the parser, which then reports no question.
    return entry | {"conversations": pairs or [{"from": "gpt", "value": PLACEHOLDER}]}


def _has_role(message: Any) -> bool:
    """Returns whether a message of a conversation is an object with a known role."""
    return isinstance(message, dict) and message.get("from") in ("human", "gpt")
