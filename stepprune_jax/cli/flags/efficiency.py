"""Flags of `stepprune-efficiency`."""

import argparse
from collections.abc import Sequence

from stepprune_jax.cli.choices import ATTENTIONS, DECODER_LAYERS, MODEL_SHAPES, WEIGHTS
from stepprune_jax.cli.command_line import Parser, integer_from

NAME = "stepprune-efficiency"
_DESCRIPTION = (
    "Measures the cost and savings of pruning from pixels to the first token, as a table."
)


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Parses the flags; exits with an error message if --json and --dry_run are both missing."""
    parser = Parser(prog=NAME, description=_DESCRIPTION)
    add, positive = parser.add_argument, integer_from(1)
    add("--model", default="mid", help=f"{', '.join(MODEL_SHAPES)}, or a config.json")
    help_text = "visual tokens of each image, for Qwen2.5-VL and Qwen3-VL"
    add("--tokens", type=positive, default=576, help=help_text)
    help_text = "frames of a video in place of each image; --tokens are then those of two frames"
    add("--frames", type=positive, help=help_text)
    add("--json", help="file for the results")
    add("--dry_run", action="store_true", help="count operations and exit")
    help_text = "rows, such as all cls@64 'stepprune@64 group=4'; default: every pruner"
    add("--rows", nargs="+", help=help_text)
    add("--batch", type=positive, nargs="+", default=[1, 8], help="batch sizes")
    dtypes = ["float32", "bfloat16"]
    add("--dtype", choices=dtypes, default="float32", help="dtype of the model")
    help_text = "int8: quantize the matrices of the language model"
    add("--weights", choices=WEIGHTS, default="full", help=help_text)
    add("--policy_dtype", choices=dtypes, default="float32", help="dtype of the policies")
    help_text = "layers of the policies' decoder"
    add("--decoder_layers", type=positive, default=DECODER_LAYERS, help=help_text)
    add("--text", type=positive, default=64, help="text tokens of each prompt")
    help_text = "tokens to decode after the first token"
    add("--new_tokens", type=positive, default=16, help=help_text)
    help_text = "attention implementation"
    add("--attention", choices=ATTENTIONS, default=ATTENTIONS[0], help=help_text)
    add("--rounds", type=positive, default=5, help="measurements of every row")
    help_text = "also time the last row in two new processes, without and with stored programs"
    add("--first_answer", action="store_true", help=help_text)
    flags = parser.parse_args(arguments)
    if not (flags.json or flags.dry_run):
        parser.error("the following arguments are required: --json, or --dry_run")
    return flags
