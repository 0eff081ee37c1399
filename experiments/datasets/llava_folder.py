"""Writes data folders in LLaVA's format."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from stepprune_jax.data.json_files import write_json_lines


class Asked(NamedTuple):
    """A question about an image, with its answer.

    Attributes:
        question: the question.
        answer: one word.
        category: kind of question, for tables.
        image: path of the image in the folder `images/`.
    """

    question: str
    answer: str
    category: str
    image: str


def write_conversations(out: Path, questions: Sequence[Asked]) -> None:
    """Writes `train.json`: all questions about an image as one conversation."""
    turns: dict[str, list[dict[str, str]]] = {}
    for question, answer, _, image in questions:
        turns_of_image = turns.setdefault(image, [])
        turns_of_image.append(
            {"from": "human", "value": question if turns_of_image else f"<image>\n{question}"}
        )
        turns_of_image.append({"from": "gpt", "value": answer})
    samples = [
        {"id": Path(image).stem, "image": image, "conversations": turns_of_image}
        for image, turns_of_image in turns.items()
    ]
    (out / "train.json").write_text(json.dumps(samples, indent=0) + "\n", encoding="utf-8")


def write_questions(out: Path, split: str, asked_questions: Sequence[Asked]) -> None:
    """Writes `SPLIT.jsonl` and `SPLIT_answers.jsonl`."""
    questions, answers = [], []
    for number, (question, answer, category, image) in enumerate(asked_questions):
        name = f"{split}_{number:06d}"
        questions.append(
            {"question_id": name, "image": image, "text": question, "category": category}
        )
        answers.append({"question_id": name, "answer": answer})
    write_json_lines(out / f"{split}.jsonl", questions)
    write_json_lines(out / f"{split}_answers.jsonl", answers)
