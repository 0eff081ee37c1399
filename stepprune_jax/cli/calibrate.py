"""Measures how many tokens a policy keeps on average at each stop bias, for `--mean_budget`.

    stepprune-calibrate --policy FILE --model DIR --data FOLDER --out NEW

A policy stops when its stop logit plus the stop bias exceeds the logits of all tokens. NEW is the
same policy with a table of stop biases. FOLDER has questions in LLaVA's format (validation.jsonl,
images/), whose answers are not read. Training with a validation split already makes this table.
"""

from collections.abc import Sequence

import jax.numpy as jnp

from stepprune_jax.checkpoints.folder import inspect_folder
from stepprune_jax.checkpoints.identity import load_policy_for
from stepprune_jax.checkpoints.load import load_vlm
from stepprune_jax.checkpoints.policy import read_about, save_policy
from stepprune_jax.cli import model_flags
from stepprune_jax.cli.command_line import check_creatable, exit_with
from stepprune_jax.cli.flags.calibrate import NAME, parse
from stepprune_jax.data.llava import read_questions
from stepprune_jax.evaluation.calibrate import calibrate_policy
from stepprune_jax.evaluation.split import spread_over
from stepprune_jax.models.stack import Execution
from stepprune_jax.selectors import Policy
from stepprune_jax.user_input import UserError, local_path


def main(argv: Sequence[str] | None = None) -> None:
    """Calibrates a policy: writes it with a table of stop biases and mean counts, and prints both.

    Args:
        argv: command-line arguments; None reads the arguments of the process.
    """
    flags = parse(argv)
    source = inspect_folder(flags.model, **model_flags.image_options(flags))
    policy, metadata = load_policy_for(source, flags.policy), read_about(flags.policy)
    if not isinstance(policy, Policy) or not policy.has_stop:
        raise UserError(
            f"--policy: {policy.name} has no learned stop to calibrate, expected a policy with a "
            "learned stop"
        )
    policy.check_fits(source.config)
    check_creatable("--out", flags.out, is_folder=False)
    folder = local_path(flags.data)
    all_questions = read_questions(folder / f"{flags.split}.jsonl", folder / "images")
    indices = spread_over(len(all_questions), flags.questions)
    questions = [all_questions[index] for index in indices]
    model = load_vlm(flags.model, dtype=jnp.dtype(flags.dtype), **model_flags.image_options(flags))
    policy = calibrate_policy(model, policy, questions, Execution(), flags.batch_size)
    out = local_path(flags.out)
    out.parent.mkdir(parents=True, exist_ok=True)
    path = save_policy(policy, out, metadata)
    print(_format_calibration(policy))
    print(path)


def _format_calibration(policy: Policy) -> str:
    """Formats the calibration of a policy as text: one line per stop bias.

    The columns are the mean count of kept tokens, the stop bias, and the fractions of questions
    that keep the smallest and the largest number of tokens that the policy allows.

    Args:
        policy: the policy. Without a calibration, the text is empty.
    """
    if (table := policy.calibration) is None:
        return ""
    lines = [
        f"{table.questions} questions, {table.num_tokens:g} visual tokens each on average",
        "mean count  stop bias  at minimum  at maximum",
    ]
    columns = (table.mean_count, table.stop_bias, table.at_floor, table.at_cap)
    for mean_count, stop_bias, at_minimum, at_maximum in zip(*columns, strict=True):
        lines.append(
            f"{mean_count:10.1f}  {stop_bias:9.3f}  {at_minimum:10.0%}  {at_maximum:10.0%}"
        )
    return "\n".join(lines)


def command() -> None:
    """Runs the command and exits with its status."""
    exit_with(NAME, main)


if __name__ == "__main__":
    command()
