"""Draws README's picture: one image, four questions, and the patches that the policy keeps.

python -m experiments.shapes --out data/untouched --test_seed 2 --test 520
python -m experiments.studies.picture --data data/untouched --out docs/images/overlay.png
"""

from collections.abc import Sequence
from pathlib import Path

from stepprune_jax.checkpoints.load import load_vlm
from stepprune_jax.checkpoints.policy import load_policy
from stepprune_jax.cli.command_line import Parser, exit_with
from stepprune_jax.data.llava import read_answers, read_questions
from stepprune_jax.inference import generate
from stepprune_jax.user_input import UserError
from stepprune_jax.visualize.overlays import Overlay, draw_rows, format_answer

_FAMILIES = ("position", "color", "counting", "majority")


def draw(folder: Path, out: Path) -> None:
    """Draws the first test image that has a question of each family in `_FAMILIES`."""
    questions = read_questions(folder / "test.jsonl", folder / "images")
    by_image: dict[Path, dict[str, tuple[str, str]]] = {}
    correct_answers = read_answers(folder / "test_answers.jsonl", questions)
    for question, correct in zip(questions, correct_answers, strict=True):
        by_image.setdefault(question.image, {})[question.category] = question.text, correct
    candidates = (
        image for image, by_family in by_image.items() if by_family.keys() >= {*_FAMILIES}
    )
    image = next(candidates, None)
    if image is None:
        raise UserError(f"{folder}: no image has questions of {', '.join(_FAMILIES)}")
    by_family = by_image[image]
    texts, truths = zip(*(by_family[family] for family in _FAMILIES), strict=True)
    model, policy = load_vlm("shapes"), load_policy("shapes")
    answers = generate(model, texts, [image] * len(texts), policy)
    panels = []
    for family, text, answer, truth in zip(_FAMILIES, texts, answers, truths, strict=True):
        is_correct, (patches,), ((side, _),) = (
            answer.text == truth,
            answer.kept_indices,
            answer.grids,
        )
        caption = format_answer(answer.text, truth, is_correct)
        title = f"K = {answer.kept}"
        overlay = Overlay(image, patches, title, family, text, caption, is_correct, side)
        panels.append(overlay)
    draw_rows(out, [panels])


def main(argv: Sequence[str] | None = None) -> None:
    """Runs the command."""
    parser = Parser(prog="experiments.studies.picture", description=__doc__.splitlines()[0])
    parser.add_argument("--data", required=True, type=Path, help="folder of experiments.shapes")
    parser.add_argument("--out", required=True, type=Path, help="the PNG to write")
    arguments = parser.parse_args(argv)
    draw(arguments.data, arguments.out)


if __name__ == "__main__":
    exit_with("experiments.studies.picture", main)
