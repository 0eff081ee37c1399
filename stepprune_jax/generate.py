"""Answers questions about images from the command line.

    python -m stepprune_jax.generate --model DIR --image x.jpg --prompt "What is this?"

The answer is streamed, followed by the number of visual tokens kept, the time to the first token
and the decoding speed. `--json` prints one JSON object instead; `--overlay` draws the kept tokens.
"""

import argparse
import json
import sys
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NoReturn

import jax.numpy as jnp
import numpy as np
from PIL import Image

from stepprune_jax.checkpoints import folder as folders
from stepprune_jax.checkpoints.load import VLM, load_params, make_vlm
from stepprune_jax.checkpoints.policy import load_policy
from stepprune_jax.command_line import Parser, exit_with, program
from stepprune_jax.data.images import open_image
from stepprune_jax.data.json_files import file_named
from stepprune_jax.inference.answer import (
    Answer,
    Options,
    check_options,
    generate,
    trace_arrays,
)
from stepprune_jax.inference.request import read_request
from stepprune_jax.models.stack import ATTENTIONS, LAYOUTS, Execution
from stepprune_jax.parallel.sharding import PRESETS, build_mesh
from stepprune_jax.pruning import POSITIONS, PRUNERS, read_options
from stepprune_jax.user_input import one_line

_NAME = "stepprune_jax.generate"
_DTYPES = {"bfloat16": jnp.bfloat16, "float32": jnp.float32, "float16": jnp.float16}
# Errors of the user; anything else is a bug and keeps its traceback.
_USER_ERRORS = (ValueError, OSError, ImportError)


def _parser() -> argparse.ArgumentParser:
    """Builds the parser of the command's options."""
    parser = Parser(prog=program(_NAME), description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--model", required=True, help="checkpoint folder, hub id, shapes or shapes_qwen")
    add("--vision_folder", help="CLIP folder of an original LLaVA-v1.5 checkpoint")
    add("--image", action="append", default=[], help="image file; may be repeated")
    add("--min_pixels", type=int, help="smallest area of a resized image, if sizes vary")
    add("--max_pixels", type=int, help="largest area of a resized image, if sizes vary")
    add("--prompt", help="the question; with --interactive, the first one")
    add("--interactive", action="store_true", help="read questions from stdin until 'exit'")
    add("--pruner", help=f"pruning method: {', '.join(PRUNERS)}")
    add("--policy", help="trained pruner: a file, a shipped name such as shapes, or hub:owner/name")
    add("--budget", help="tokens to keep per image: 64, 1/3, 22.2%%; default: the policy's stop")
    add("--mean_budget", type=float, help="tokens to keep on average, for a calibrated policy")
    add("--pruner_options", nargs="+", default=[], metavar="KEY=VALUE", help="e.g. fastv's layer=3")
    add("--stop_bias", type=float, help="added to the policy's stop logits instead of its own")
    add("--positions", choices=POSITIONS, default="own", help="position ids of kept tokens")
    add("--max_tokens", type=int, default=128, help="longest answer, in tokens")
    add("--temperature", type=float, default=0.0, help="0 is greedy")
    add("--top_p", type=float, default=1.0, help="probability mass to sample from")
    add("--repetition_penalty", type=float, help="1: none; default: the model folder's")
    add("--seed", type=int, default=0, help="seed of the sampling")
    add("--dtype", choices=tuple(_DTYPES), default="bfloat16", help="dtype of weights and compute")
    add("--mesh", choices=PRESETS, help="preset for sharding over all devices")
    add("--attention", choices=ATTENTIONS, default="matmul", help="attention implementation")
    add("--layers", choices=LAYOUTS, default="auto", help="placement of layer weights")
    add("--json", action="store_true", help="print one JSON object and nothing else")
    add("--overlay", metavar="FILE.png", help="draw the kept tokens, in order of choice")
    add("--trace", metavar="FILE.npz", help="write the kept tokens of each stage, and the logits")
    return parser


def _prepare(arguments: argparse.Namespace) -> tuple[VLM, list[Image.Image], Options]:
    """Checks every input before loading the weights."""
    if arguments.prompt is None and not arguments.interactive:
        raise ValueError("--prompt is missing (or --interactive, to read questions from stdin)")
    if arguments.json and arguments.interactive:
        raise ValueError("--json answers one --prompt and cannot be combined with --interactive")
    if arguments.overlay is not None:
        _check_overlay(arguments)
    if arguments.trace is not None:
        _check_trace(arguments)
    images = [open_image(path) for path in arguments.image]
    source = folders.inspect_folder(
        arguments.model,
        arguments.vision_folder,
        min_pixels=arguments.min_pixels,
        max_pixels=arguments.max_pixels,
    )
    tokenizer = folders.load_tokenizer(source.folder)
    settings = source.config.family.image_settings(source.vision_folder or source.folder)
    options = Options(
        policy=load_policy(arguments.policy) if arguments.policy is not None else None,
        pruner_options=read_options("--pruner_options", arguments.pruner_options),
        execution=Execution(attention=arguments.attention),
        **{name: getattr(arguments, name) for name in _OPTIONS},
    )
    check_options(source.config, options)
    question = "?" if arguments.prompt is None else arguments.prompt
    read_request(tokenizer, settings, source.config, [question], [arguments.image])
    mesh = None if arguments.mesh is None else build_mesh(arguments.mesh)
    dtype, layers = _DTYPES[arguments.dtype], arguments.layers
    params = load_params(source, mesh, dtype, layers=layers)
    return make_vlm(source, params, tokenizer, settings), images, options


def _check_trace(arguments: argparse.Namespace) -> None:
    """Raises if a trace could not be written."""
    path = Path(arguments.trace)
    if not arguments.json:
        raise ValueError("--trace requires --json")
    if path.suffix != ".npz" or not path.parent.is_dir():
        raise ValueError(
            f"--trace is {arguments.trace!r}, expected a .npz file in an existing folder"
        )


def _check_overlay(arguments: argparse.Namespace) -> None:
    """Raises if an overlay could not be drawn."""
    path = Path(arguments.overlay)
    if arguments.interactive or not arguments.image:
        raise ValueError("--overlay requires one --prompt and at least one --image")
    if path.suffix != ".png" or not path.parent.is_dir():
        raise ValueError(
            f"--overlay is {arguments.overlay!r}, expected a .png file in an existing folder"
        )


_OPTIONS = (
    "pruner",
    "budget",
    "mean_budget",
    "stop_bias",
    "positions",
    "max_tokens",
    "temperature",
    "top_p",
    "repetition_penalty",
    "seed",
)


def _summary(answer: Answer) -> str:
    """Formats kept tokens, latency and speed in one line."""
    return (
        f"[kept {answer.kept} of {answer.visual_tokens} visual tokens, first token after "
        f"{answer.ttft_ms:.1f} ms, {answer.tokens_per_s:.1f} tokens/s]"
    )


def _say(model: VLM, turns: Sequence[str], images: list[Image.Image], options: Options) -> Answer:
    """Streams an answer, followed by its summary."""

    def write(row: int, token: int, piece: str) -> None:
        print(piece, end="", flush=True)

    (answer,) = generate(model, [turns], [images], on_token=write, **options._asdict())
    print(f"\n{_summary(answer)}", flush=True)
    return answer


def _questions(first: str | None) -> Iterator[str]:
    """Yields the first question if there is one, then lines of stdin until its end or "exit"."""
    if first is not None:
        yield first
    while sys.stdin is not None:  # closed, as by `<&-`
        if sys.stdin.isatty():
            print("> ", end="", file=sys.stderr, flush=True)
        line = sys.stdin.readline()
        if not line or line.strip() == "exit":
            return
        if line.strip():
            yield line.strip()


def _converse(model: VLM, first: str | None, images: list[Image.Image], options: Options) -> None:
    """Answers question after question; the images and the conversation are kept."""
    turns: list[str] = []
    for question in _questions(first):
        try:
            answer = _say(model, [*turns, question], images, options)
        except ValueError as error:
            _complain(error)
            continue
        turns += [question, answer.text]


def _complain(error: Exception) -> None:
    """Prints an error in one line, without a traceback."""
    print(f"{program(_NAME)}: error: {one_line(error)}", file=sys.stderr, flush=True)


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command.

    Args:
        arguments: command-line arguments; default: those of the process.

    Returns:
        The exit status: 0, or 2 for a mistake in the input, which is reported on stderr.
    """
    parsed = _parser().parse_args(arguments)
    shown: set[str] = set()

    def show(message: Warning | str, *_: Any, **__: Any) -> None:
        if str(message) not in shown:  # options are read twice: before the weights are, and after
            shown.add(str(message))
            print(f"warning: {one_line(message)}", file=sys.stderr)

    with warnings.catch_warnings():
        # Warnings are shown to the user without the line of code.
        warnings.showwarning = show
        return _run(parsed)


def _run(parsed: argparse.Namespace) -> int:
    """Runs the parsed command and returns its exit status."""
    if hasattr(sys.stdin, "reconfigure"):  # a question that is not UTF-8 is rejected as a prompt
        sys.stdin.reconfigure(errors="surrogateescape")
    try:
        model, images, options = _prepare(parsed)
    except _USER_ERRORS as error:
        _complain(error)
        return 2
    if parsed.interactive:
        try:
            _converse(model, parsed.prompt, images, options)
        except KeyboardInterrupt:
            print(file=sys.stderr)
    elif parsed.json:
        if parsed.trace is not None:
            options = options._replace(
                trace=lambda begun: _save_trace(parsed.trace, trace_arrays(begun))
            )
        (answer,) = generate(model, [parsed.prompt], [images], **options._asdict())
        print(json.dumps(answer._asdict()))
        _draw(parsed, model, images, answer)
    else:
        _draw(parsed, model, images, _say(model, [parsed.prompt], images, options))
    return 0


def _save_trace(path: str, arrays: dict[str, np.ndarray]) -> None:
    """Writes a trace."""
    with file_named(Path(path)):
        np.savez_compressed(path, **arrays)


def _draw(
    parsed: argparse.Namespace, model: VLM, images: list[Image.Image], answer: Answer
) -> None:
    """Draws the kept tokens, if requested."""
    if parsed.overlay is not None:
        # Imported here: answering does not need these packages.
        from stepprune_jax.visualize.overlays import draw_answer

        with file_named(Path(parsed.overlay)):
            draw_answer(parsed.overlay, model, images, parsed.prompt, answer)


def command() -> NoReturn:
    """Runs the command and exits."""
    exit_with(_NAME, main)


if __name__ == "__main__":
    command()
