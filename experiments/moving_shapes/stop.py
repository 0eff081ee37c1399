r"""Prints how the counts of a learned stop follow the frames that hold the answers.

python -m experiments.moving_shapes.stop --data data/moving_shapes \
        --answers runs/moving_shapes/answers/folder/stepprune-own-stop.jsonl
"""

import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from experiments.studies.answers import spearman
from stepprune_jax.cli.command_line import Parser, exit_with
from stepprune_jax.data.json_files import read_json_lines

_NAME = "experiments.moving_shapes.stop"


def describe_stop(answers_file: Path, data_folder: Path) -> dict[str, object]:
    """Returns statistics of a row of `eval.py` whose counts follow from the learned stop.

    Args:
        answers_file: the row's answers, a file of JSON lines with "question_id" and "kept".
        data_folder: folder of the world, with "frames" in `test.jsonl`.

    Returns:
        The mean number of kept tokens, by kind of question and in total, and the rank correlation
        of kept tokens and number of frames that hold the answer.
    """
    questions = {
        record.value["question_id"]: record.value
        for record in read_json_lines(data_folder / "test.jsonl")
    }
    answers = [record.value for record in read_json_lines(answers_file)]
    kept = np.array([answer["kept"] for answer in answers])
    rows = [questions[answer["question_id"]] for answer in answers]
    families = np.array([row["category"] for row in rows])
    num_frames = np.array([len(row["frames"]) for row in rows])
    means = {str(name): round(float(kept[families == name].mean()), 1) for name in set(families)}
    return {
        "mean_kept": round(float(kept.mean()), 2),
        "mean_kept_by_family": dict(sorted(means.items())),
        "spearman_frames": spearman(kept, num_frames),
    }


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs the command."""
    parser = Parser(prog=_NAME, description=__doc__)
    parser.add_argument("--answers", required=True, type=Path, help="answers of the learned stop")
    parser.add_argument("--data", default=Path("data/moving_shapes"), type=Path, help="the world")
    flags = parser.parse_args(arguments)
    print(json.dumps(describe_stop(flags.answers, flags.data), indent=1))


if __name__ == "__main__":
    exit_with(_NAME, main)
