"""Writes small GQA, MME and POPE in LLaVA's folder layout, with questions of the shapes world.

    python -m experiments.studies.example --out example

With these files, a user can try all stages of an evaluation without the real benchmarks. Formats
are official, but questions are not. They lack LLaVA's request for a short answer, because the model
of the shapes world was not trained with it. Scores are not comparable with published scores.
"""

import json
import shutil
from collections import defaultdict
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

from experiments.shapes import write_world
from stepprune_jax.benchmarks.mme import COGNITION, PERCEPTION
from stepprune_jax.benchmarks.pope import SPLITS
from stepprune_jax.cli.command_line import Parser, exit_with
from stepprune_jax.data.json_files import write_json_lines
from stepprune_jax.data.llava import read_answers, read_questions

_SCENES = 60  # Gives an image with a yes and a no for each task of MME.
_POPE_STEP = 10**7  # Distance between the ids of POPE's splits in LLaVA's list.


class LabeledQuestion(NamedTuple):
    """A question of the shapes world, with its image, its family and the correct answer."""

    text: str
    image: Path
    kind: str
    answer: str


def write_example(out: str | Path) -> Path:
    """Writes the three benchmarks to OUT/eval and the world to OUT/world; returns OUT/eval."""
    root = Path(out) / "eval"
    if root.exists():
        raise FileExistsError(f"{root} exists: remove it, or give another --out")
    world = write_world(Path(out) / "world", seed=0, train=0, validation=0, test=_SCENES)
    questions = read_questions(world / "test.jsonl", world / "images")
    answers = read_answers(world / "test_answers.jsonl", questions)
    pairs = zip(questions, answers, strict=True)
    labeled = [
        LabeledQuestion(question.text, question.image, question.category, answer)
        for question, answer in pairs
    ]
    _write_gqa(root / "gqa", [row for row in labeled if row.kind != "existence"])
    _write_pope(root / "pope", [row for row in labeled if row.kind == "existence"])
    _write_mme(root / "MME", dict(zip((*PERCEPTION, *COGNITION), _pairs(labeled), strict=False)))
    return root


def _pairs(labeled: Iterable[LabeledQuestion]) -> list[tuple[LabeledQuestion, LabeledQuestion]]:
    """Returns one question with the answer yes and one with no, of each image that has both."""
    by_image: dict[Path, dict[str, LabeledQuestion]] = defaultdict(dict)
    for row in labeled:
        if row.answer in ("yes", "no"):
            by_image[row.image].setdefault(row.answer, row)
    return [(rows["yes"], rows["no"]) for rows in by_image.values() if len(rows) == 2]


def _write_gqa(folder: Path, labeled: Sequence[LabeledQuestion]) -> None:
    """Writes LLaVA's list and the official questions of test-dev."""
    lines, official = [], {}
    for number, row in enumerate(labeled):
        _copy(row.image, folder / "data" / "images" / row.image.name)
        name = str(number)
        lines.append({"question_id": name, "image": row.image.name, "text": row.text})
        official[name] = {
            "question": row.text,
            "imageId": row.image.stem,
            "answer": row.answer,
            "isBalanced": True,
            "types": {"structural": row.kind, "semantic": row.kind},
            "semantic": [],
            "groups": {"global": None, "local": row.kind},
        }
    write_json_lines(folder / "llava_gqa_testdev_balanced.jsonl", lines)
    path = folder / "data" / "testdev_balanced_questions.json"
    path.write_text(json.dumps(official), encoding="utf-8")


def _write_pope(folder: Path, labeled: Sequence[LabeledQuestion]) -> None:
    """Writes LLaVA's list and the labels of the splits. Each split has every third question."""
    lines = []
    (folder / "coco").mkdir(parents=True)
    for split_index, split in enumerate(SPLITS):
        labels = []
        for number, row in enumerate(labeled[split_index :: len(SPLITS)], start=1):
            _copy(row.image, folder / "val2014" / row.image.name)
            fields = {"image": row.image.name, "text": row.text}
            name = split_index * _POPE_STEP + number
            lines.append({"question_id": name, **fields, "category": split})
            labels.append({"question_id": number, **fields, "label": row.answer})
        write_json_lines(folder / "coco" / f"coco_pope_{split}.json", labels)
    write_json_lines(folder / "llava_pope_test.jsonl", lines)


def _write_mme(folder: Path, pairs: dict[str, tuple[LabeledQuestion, LabeledQuestion]]) -> None:
    """Writes LLaVA's list and the files of the authors' release, with one image per task."""
    lines = []
    for task, rows in pairs.items():
        task_folder = folder / "MME_Benchmark_release_version" / task
        _copy(rows[0].image, task_folder / "1.png")
        text = [f"{row.text} Please answer yes or no.\t{row.answer.title()}" for row in rows]
        (task_folder / "1.txt").write_text("\n".join(text), encoding="utf-8")
        name = f"{task}/1.png"
        fields = {"question_id": name, "image": name}
        lines += [{**fields, "text": row.text, "category": task} for row in rows]
    write_json_lines(folder / "llava_mme.jsonl", lines)


def _copy(image: Path, target: Path) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(image, target)


def main(argv: Sequence[str] | None = None) -> None:
    """Runs the command."""
    parser = Parser(prog="experiments.studies.example", description=__doc__.splitlines()[0])
    parser.add_argument("--out", required=True, help="folder to write")
    arguments = parser.parse_args(argv)
    root = write_example(arguments.out)
    print(f"wrote {root}: pass it as --data, or as --config.eval.data")


if __name__ == "__main__":
    exit_with("experiments.studies.example", main)
