"""Writes data folders in LLaVA's format."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from stepprune_jax.data.json_files import write_json_lines


class AnsweredQuestion(NamedTuple):
    """A question about an image, with its answer.

    Attributes:
        question: the question.
        answer: one word.
        category: kind of question, a column of tables.
        image: path of the image in the folder `images/`.
    """

    question: str
    answer: str
    category: str
    image: str


def write_conversations(out: Path, questions: Sequence[AnsweredQuestion]) -> None:
    """Writes `train.json`, with one conversation for all questions about an image."""
    conversations: dict[str, list[dict[str, str]]] = {}
    for question, answer, _, image in questions:
        conversation = conversations.setdefault(image, [])
        conversation.append(
            {"from": "human", "value": question if conversation else f"<image>\n{question}"}
        )
        conversation.append({"from": "gpt", "value": answer})
    samples = [
        {"id": Path(image).stem, "image": image, "conversations": conversation}
        for image, conversation in conversations.items()
    ]
    (out / "train.json").write_text(json.dumps(samples, indent=0) + "\n", encoding="utf-8")


def write_questions(out: Path, split: str, answered_questions: Sequence[AnsweredQuestion]) -> None:
    """Writes `SPLIT.jsonl` and `SPLIT_answers.jsonl`."""
    questions, answers = [], []
    for number, (question, answer, category, image) in enumerate(answered_questions):
        name = f"{split}_{number:06d}"
        questions.append(
            {"question_id": name, "image": image, "text": question, "category": category}
        )
        answers.append({"question_id": name, "answer": answer})
    write_json_lines(out / f"{split}.jsonl", questions)
    write_json_lines(out / f"{split}_answers.jsonl", answers)
