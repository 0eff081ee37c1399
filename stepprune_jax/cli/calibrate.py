"""Measures how many tokens each stop bias keeps on average, for `--mean_budget`.

    stepprune-calibrate --policy FILE --model DIR --data FOLDER --out NEW

Training does this by itself if there is a validation split. The folder holds questions in LLaVA's
format (validation.jsonl, images/); answers are not read. NEW is the same policy with a table.
"""

from collections.abc import Sequence
from typing import NoReturn

import jax.numpy as jnp

from stepprune_jax.checkpoints.folder import inspect_folder
from stepprune_jax.checkpoints.identity import load_policy_for
from stepprune_jax.checkpoints.load import load_vlm
from stepprune_jax.checkpoints.model_settings import DTYPES
from stepprune_jax.checkpoints.policy import read_about, save_policy
from stepprune_jax.cli.command_line import Parser, check_creatable, exit_with, integer_from
from stepprune_jax.data.llava import read_questions
from stepprune_jax.evaluation.calibrate import calibrate_policy
from stepprune_jax.evaluation.split import spread_over
from stepprune_jax.models.stack import Execution
from stepprune_jax.selectors.calibration import Calibration
from stepprune_jax.user_input import local_path, require

_NAME = "stepprune-calibrate"


def main(argv: Sequence[str] | None = None) -> None:
    """Reads the arguments and calibrates; reports errors in one line and exits with status 2."""
    parser = Parser(prog=_NAME, description=__doc__.splitlines()[0], compiles=True)
    add = parser.add_argument
    add("--policy", required=True, help="policy file, shipped name, or hub:owner/name")
    add(
        "--model",
        required=True,
        help="model it was trained for: folder, hub id, shapes or shapes_qwen",
    )
    add("--vision_folder", help="CLIP folder of an original LLaVA-v1.5 checkpoint")
    add("--min_pixels", type=int, help="smallest area of a resized image, if sizes vary")
    add("--max_pixels", type=int, help="largest area of a resized image")
    add("--data", required=True, help="folder with SPLIT.jsonl and images/")
    add("--split", default="validation", help="split to read; default: validation")
    add(
        "--questions",
        type=integer_from(0),
        default=256,
        help="number of questions, spread evenly; 0: all",
    )
    add("--batch_size", type=integer_from(1), default=16, help="questions per batch")
    add("--dtype", choices=DTYPES, default="bfloat16", help="dtype of the model")
    add("--out", required=True, help="policy file to write")
    given = parser.parse_args(argv)
    sizes = {name: getattr(given, name) for name in ("min_pixels", "max_pixels")}
    source = inspect_folder(given.model, given.vision_folder, **sizes)
    policy, about = load_policy_for(source, given.policy), read_about(given.policy)
    require(policy.has_stop, f"--policy: {policy.name} has no learned stop to calibrate")
    policy.check_fits(source.config)
    check_creatable("--out", given.out, is_folder=False)
    folder = local_path(given.data)
    all_questions = read_questions(folder / f"{given.split}.jsonl", folder / "images")
    questions = [all_questions[row] for row in spread_over(len(all_questions), given.questions)]
    dtype = jnp.dtype(given.dtype)
    model = load_vlm(given.model, dtype=dtype, vision_folder=given.vision_folder, **sizes)
    policy = calibrate_policy(model, policy, questions, Execution(), given.batch_size)
    out = local_path(given.out)
    out.parent.mkdir(parents=True, exist_ok=True)
    path = save_policy(policy, out, about)
    print(_page(policy.calibration))
    print(path)


def _page(table: Calibration) -> str:
    """Formats the table as text."""
    lines = [
        f"{table.questions} questions, {table.num_tokens:g} visual tokens each on average",
        "mean count  stop bias  at minimum  at maximum",
    ]
    columns = (table.mean_count, table.stop_bias, table.at_floor, table.at_cap)
    for mean, bias, floor, cap in zip(*columns, strict=True):
        lines.append(f"{mean:10.1f}  {bias:9.3f}  {floor:10.0%}  {cap:10.0%}")
    return "\n".join(lines)


def command() -> NoReturn:
    """Runs the command and exits."""
    exit_with(_NAME, main)


if __name__ == "__main__":
    command()
