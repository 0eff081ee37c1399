"""Writes data folders in LLaVA's format: what importers of other data sets share."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from stepprune_jax.data.json_files import write_json_lines
from stepprune_jax.user_input import UserError


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


def validation_images(numbers: Sequence[int], share: float, seed: int) -> set[int]:
    """Chooses the training images that become the validation split."""
    count = round(share * len(numbers)) if 0 < share < 1 else 0
    if not 0 < count < len(numbers):
        raise UserError(
            f"validation_share is {share}, expected a share from 0 to 1 that leaves some of the "
            f"{len(numbers)} training images to each split"
        )
    return set(np.random.default_rng(seed).permutation(np.asarray(numbers))[:count].tolist())


def write_conversations(out: Path, asked: Sequence[Asked]) -> None:
    """Writes `train.json`: all questions about an image as one conversation."""
    turns: dict[str, list[dict[str, str]]] = {}
    for question, answer, _, image in asked:
        said = turns.setdefault(image, [])
        said.append({"from": "human", "value": question if said else f"<image>\n{question}"})
        said.append({"from": "gpt", "value": answer})
    samples = [
        {"id": Path(image).stem, "image": image, "conversations": said}
        for image, said in turns.items()
    ]
    (out / "train.json").write_text(json.dumps(samples, indent=0) + "\n", encoding="utf-8")


def write_questions(out: Path, split: str, asked: Sequence[Asked]) -> None:
    """Writes `SPLIT.jsonl` and `SPLIT_answers.jsonl`."""
    questions, answers = [], []
    for number, (question, answer, category, image) in enumerate(asked):
        name = f"{split}_{number:06d}"
        questions.append(
            {"question_id": name, "image": image, "text": question, "category": category}
        )
        answers.append({"question_id": name, "answer": answer})
    write_json_lines(out / f"{split}.jsonl", questions)
    write_json_lines(out / f"{split}_answers.jsonl", answers)
