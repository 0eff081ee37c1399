"""Flags that the commands with a model share."""

import argparse
from collections.abc import Callable
from typing import Any

from stepprune_jax.cli.choices import ATTENTIONS, PRUNERS, WEIGHTS

# The method `add_argument` of a parser or of an argument group.
AddArgument = Callable[..., Any]
_DTYPES = ("bfloat16", "float32", "float16")


def add_model_flags(add: AddArgument, *, model: str | None = None) -> None:
    """Adds the flags of a model's files and image sizes, which `image_options` reads.

    Args:
        add: adds a flag to a parser or to a group of a parser.
        model: default of --model; None requires the flag.
    """
    help_text = "checkpoint folder, hub id, shapes or shapes_qwen"
    add("--model", required=model is None, default=model, help=help_text)
    add("--vision_folder", help="CLIP folder of an original LLaVA-v1.5 checkpoint")
    add("--min_pixels", type=int, help="smallest area of a resized image, if sizes vary")
    add("--max_pixels", type=int, help="largest area of a resized image")


def add_pruner_flags(add: AddArgument) -> None:
    """Adds the flags of the pruning method and of the number of tokens to keep.

    Args:
        add: adds a flag to a parser or to a group of a parser.
    """
    add("--pruner", help=f"pruning method: {', '.join(PRUNERS)}; or your own: FILE.py:CLASS")
    add("--policy", help="trained pruner: a file, a shipped name such as shapes, or hub:owner/name")
    help_text = "tokens to keep per image: 64, 1/3, 22.2%%; default: the policy's learned stop"
    add("--budget", help=f"{help_text} decides")
    add("--mean_budget", type=float, help="tokens to keep on average, for a calibrated policy")


def image_options(flags: argparse.Namespace) -> dict[str, Any]:
    """Returns the flags of `add_model_flags` that set how a model reads images.

    Args:
        flags: the parsed flags.

    Returns:
        Keyword arguments of `inspect_folder` and `load_vlm`.
    """
    names = ("vision_folder", "min_pixels", "max_pixels")
    return {name: getattr(flags, name) for name in names}


def add_execution_flags(add: AddArgument) -> None:
    """Adds the flags of the model's numeric formats and of its attention implementation.

    Args:
        add: adds a flag to a parser or to a group of a parser.
    """
    add("--dtype", choices=_DTYPES, default="bfloat16", help="dtype of weights and compute")
    help_text = "int8: the language model takes half the memory"
    add("--weights", choices=WEIGHTS, default="full", help=help_text)
    add("--attention", choices=ATTENTIONS, default="matmul", help="attention implementation")
