"""Flags of `stepprune-generate`."""

import argparse
from collections.abc import Sequence
from pathlib import Path

from stepprune_jax.cli import model_flags
from stepprune_jax.cli.choices import MESHES, POSITIONS
from stepprune_jax.cli.command_line import Parser, StoreOnce, file_to_write, integer_from
from stepprune_jax.user_input import UserError, expect, local_path

NAME = "stepprune-generate"
BATCH_SIZE = 8  # Questions in a batch of --questions, by default.
_DESCRIPTION = "Answers questions about images from the command line."


def _build_parser() -> Parser:
    """Builds the parser of the command line, with the flags in groups."""
    parser = Parser(prog=NAME, description=_DESCRIPTION, compiles=True)
    add = parser.add_argument_group("model").add_argument
    model_flags.add_model_flags(add)
    add = parser.add_argument_group("questions").add_argument
    add("--image", action="append", type=local_path, default=[], help="file; may be repeated")
    help_text = "file, for Qwen2.5-VL and Qwen3-VL; may be repeated"
    add("--video", action="append", type=local_path, default=[], help=help_text)
    help_text = "frames to sample per second of --video; default: the model's, usually 2"
    add("--fps", type=float, help=help_text)
    add("--num_frames", type=int, help="number of frames to sample of --video, instead of --fps")
    help_text = "the question; with --interactive, the first question"
    add("--prompt", action=StoreOnce, help=help_text)
    add("--system", help="system prompt, which replaces the prompt of the model's template")
    add("--interactive", action="store_true", help="read questions from stdin until 'exit'")
    help_text = "file of questions: lines with question_id, image and text"
    add("--questions", type=local_path, metavar="FILE.jsonl", help=help_text)
    help_text = "folder of the images of --questions; default: the folder of the file"
    add("--image_folder", type=local_path, help=help_text)
    help_text = f"with --questions: questions per batch; default: {BATCH_SIZE}"
    add("--batch_size", type=integer_from(1), help=help_text)
    add = parser.add_argument_group("pruning").add_argument
    model_flags.add_pruner_flags(add)
    add("--pruner_options", nargs="+", default=[], metavar="KEY=VALUE", help="e.g. fastv's layer=3")
    help_text = "bias of the policy's stop logits; replaces the bias in the policy file"
    add("--stop_bias", type=float, help=help_text)
    add("--positions", choices=POSITIONS, default="own", help="position ids of kept tokens")
    add = parser.add_argument_group("answers").add_argument
    add("--max_tokens", type=int, default=128, help="length limit of the answer")
    add("--temperature", type=float, default=0.0, help="sampling temperature; 0 is greedy")
    add("--top_p", type=float, default=1.0, help="probability mass to sample from")
    add("--repetition_penalty", type=float, help="1: no penalty; default: from the model folder")
    add("--seed", type=int, default=0, help="seed of the sampling")
    add = parser.add_argument_group("machine").add_argument
    model_flags.add_execution_flags(add)
    add("--mesh", help=f"sharding over all devices: {', '.join(MESHES)}, or data=2,tensor=-1")
    add = parser.add_argument_group("results").add_argument
    help_text = "file for the answers to --questions; the command continues an existing file"
    add("--out", metavar="FILE.jsonl", help=help_text)
    add("--json", action="store_true", help="print one JSON object instead of the text")
    add("--overlay", metavar="FILE.png", help="draw the kept tokens in order of selection")
    add("--trace", metavar="FILE.npz", help="write the kept tokens of each stage, and the logits")
    return parser


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Parses the flags, and checks all values that need no model.

    Args:
        arguments: command-line arguments; None reads the arguments of the process.

    Returns:
        The flags. With --questions, `out` and `image_folder` are paths.

    Raises:
        UserError: a flag is missing or contradicts another flag, or a result cannot be written.
    """
    flags = _build_parser().parse_args(arguments)
    _check_flags(flags)
    return flags


def _check_flags(flags: argparse.Namespace) -> None:
    """Raises a UserError if flags contradict each other, or a result file cannot be written."""
    names = ("budget", "mean_budget", "stop_bias")
    budget_flags = [f"--{name}" for name in names if getattr(flags, name) is not None]
    has_mean = flags.mean_budget is not None or (flags.budget or "").startswith("mean:")
    if has_mean and len(budget_flags) > 1:  # A mean budget determines the stop bias.
        raise UserError(f"{' and '.join(budget_flags)} are given, expected one of them")
    if flags.questions is not None or flags.out is not None:
        _check_question_flags(flags)
        return
    for name in ("image_folder", "batch_size"):
        if getattr(flags, name) is not None:
            raise UserError(f"--{name} requires --questions")
    if flags.prompt is None and not flags.interactive:
        raise UserError("--prompt is missing (or --interactive, to read questions from stdin)")
    if flags.json and flags.interactive:
        raise UserError("--json answers one --prompt, expected no --interactive")
    for name in ("fps", "num_frames"):
        if getattr(flags, name) is not None and not flags.video:
            raise UserError(f"--{name} requires --video")
    if flags.overlay is not None and flags.video:
        raise UserError("--overlay cannot draw videos; omit it, and --json prints the kept tokens")
    if flags.overlay is not None and (flags.interactive or not flags.image):
        raise UserError("--overlay requires one --prompt and at least one --image")
    if flags.trace is not None and not flags.json:
        raise UserError("--trace requires --json")
    result_files = ("--overlay", flags.overlay, ".png"), ("--trace", flags.trace, ".npz")
    for flag, file, suffix in result_files:
        is_valid = file is None or (Path(file).suffix == suffix and Path(file).parent.is_dir())
        expect(flag, file, is_valid, f"a {suffix} file in an existing folder")


def _check_question_flags(flags: argparse.Namespace) -> None:
    """Checks the flags of a command with `--questions`, and sets flags.out and flags.image_folder.

    A file of questions is answered greedily.

    Raises:
        UserError: a flag does not apply to a file of questions.
    """
    if flags.questions is None or flags.out is None:
        raise UserError("--questions and --out are given together: questions and their answers")
    excluded_flags = (
        "prompt",
        "system",
        "image",
        "video",
        "interactive",
        "json",
        "overlay",
        "trace",
    )
    excluded_flags += ("temperature", "top_p", "repetition_penalty", "seed")
    parser = _build_parser()
    for name in excluded_flags:
        if getattr(flags, name) != parser.get_default(name):
            message = f"--{name} does not belong to --questions, which is answered greedily"
            raise UserError(message)
    flags.out = file_to_write("--out", flags.out)
    flags.image_folder = flags.image_folder or flags.questions.parent
