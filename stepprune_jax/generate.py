"""Answers questions about images from the command line.

    python -m stepprune_jax.generate --model DIR --image x.jpg --prompt "What is this?"

The answer is written as it comes; then how many visual tokens were kept, the time to the first
token and the decoding speed. `--json` prints one JSON object instead; `--overlay` draws what was
kept.
"""

import argparse
import json
import sys
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NoReturn

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

_NAME = "stepprune_jax.generate"
_DTYPES = {"bfloat16": jnp.bfloat16, "float32": jnp.float32, "float16": jnp.float16}
# What a user can do wrong; anything else is a bug and keeps its traceback.
_USER_ERRORS = (ValueError, OSError, ImportError)


def _parser() -> argparse.ArgumentParser:
    """The command's options."""
    parser = Parser(prog=program(_NAME), description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--model", required=True, help="checkpoint folder, hub id, or shapes: the small one")
    add("--vision_folder", help="CLIP folder of an original LLaVA-v1.5 checkpoint")
    add("--image", action="append", default=[], help="image; may be given several times")
    add("--min_pixels", type=int, help="least area of a resized image, where sizes are free")
    add("--max_pixels", type=int, help="largest area of a resized image, likewise")
    add("--prompt", help="the question; with --interactive, the first one")
    add("--interactive", action="store_true", help="read questions from stdin until 'exit'")
    add("--pruner", help=f"what keeps visual tokens: {', '.join(PRUNERS)}")
    add("--policy", help="a trained pruner: a file, or shapes; without --budget it stops by itself")
    add("--budget", help="tokens to keep of each image: a count, or a share as 1/3 or 22.2%%")
    add("--mean_budget", type=float, help="tokens to keep on average, as the policy is calibrated")
    add("--pruner_options", nargs="+", default=[], metavar="KEY=VALUE", help="as layer=3 for fastv")
    add("--stop_bias", type=float, help="added to the policy's stop logits instead of its own")
    add("--positions", choices=POSITIONS, default="own", help="position ids of kept tokens")
    add("--max_tokens", type=int, default=128, help="longest answer")
    add("--temperature", type=float, default=0.0, help="0 is greedy")
    add("--top_p", type=float, default=1.0, help="probability mass to sample from")
    add("--repetition_penalty", type=float, help="1: none; by default the model folder's own")
    add("--seed", type=int, default=0, help="of the sampling")
    add("--dtype", choices=tuple(_DTYPES), default="bfloat16", help="of weights and computation")
    add("--mesh", choices=PRESETS, help="shard over all devices by this preset")
    add("--attention", choices=ATTENTIONS, default="matmul", help="implementation")
    add("--layers", choices=LAYOUTS, default="auto", help="where their weights lie")
    add("--json", action="store_true", help="print one JSON object and nothing else")
    add("--overlay", metavar="FILE.png", help="draw the tokens that were kept, in their order")
    add("--trace", metavar="FILE.npz", help="write what was kept, stage by stage, and the logits")
    return parser


def _prepare(arguments: argparse.Namespace) -> tuple[VLM, list[Image.Image], Options]:
    """Checks every input, and only then loads the weights."""
    if arguments.prompt is None and not arguments.interactive:
        raise ValueError("--prompt is missing (or --interactive, to read questions from stdin)")
    if arguments.json and arguments.interactive:
        raise ValueError("--json prints the answer to one --prompt: not with --interactive")
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
    read_request(tokenizer, settings, source.config, [question], [images])
    mesh = None if arguments.mesh is None else build_mesh(arguments.mesh)
    dtype, layers = _DTYPES[arguments.dtype], arguments.layers
    params = load_params(source, mesh, dtype, layers=layers)
    return make_vlm(source, params, tokenizer, settings), images, options


def _check_trace(arguments: argparse.Namespace) -> None:
    """Refuses a trace that could not be written."""
    path = Path(arguments.trace)
    if not arguments.json:
        raise ValueError("--trace goes with --json")
    if path.suffix != ".npz" or not path.parent.is_dir():
        raise ValueError(
            f"--trace is {arguments.trace!r}, expected a .npz file in a folder there is"
        )


def _check_overlay(arguments: argparse.Namespace) -> None:
    """Refuses a drawing that could not be made."""
    path = Path(arguments.overlay)
    if arguments.interactive or not arguments.image:
        raise ValueError("--overlay goes with one --prompt and at least one --image")
    if path.suffix != ".png" or not path.parent.is_dir():
        raise ValueError(
            f"--overlay is {arguments.overlay!r}, expected a .png file in a folder there is"
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
    """One line of figures."""
    return (
        f"[kept {answer.kept} of {answer.visual_tokens} visual tokens, first token after "
        f"{answer.ttft_ms:.1f} ms, {answer.tokens_per_s:.1f} tokens/s]"
    )


def _say(model: VLM, turns: Sequence[str], images: list[Image.Image], options: Options) -> Answer:
    """Writes an answer as it comes, and its figures."""

    def write(row: int, token: int, piece: str) -> None:
        print(piece, end="", flush=True)

    (answer,) = generate(model, [turns], [images], on_token=write, **options._asdict())
    print(f"\n{_summary(answer)}", flush=True)
    return answer


def _questions(first: str | None) -> Iterator[str]:
    """The first question if there is one, then lines of stdin until its end or "exit"."""
    if first is not None:
        yield first
    while True:
        if sys.stdin.isatty():
            print("> ", end="", file=sys.stderr, flush=True)
        line = sys.stdin.readline()
        if not line or line.strip() == "exit":
            return
        if line.strip():
            yield line.strip()


def _converse(model: VLM, first: str | None, images: list[Image.Image], options: Options) -> None:
    """Answers question after question; the images and what was said stay."""
    turns: list[str] = []
    for question in _questions(first):
        try:
            answer = _say(model, [*turns, question], images, options)
        except ValueError as error:
            _complain(error)
            continue
        turns += [question, answer.text]


def _complain(error: Exception) -> None:
    """Prints an error without a traceback."""
    print(f"{program(_NAME)}: error: {error}", file=sys.stderr, flush=True)


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command.

    Args:
        arguments: of the command line, by default those of the process.

    Returns:
        The exit status: 0, or 2 for a mistake in the input, which is reported on stderr.
    """
    parsed = _parser().parse_args(arguments)
    with warnings.catch_warnings():
        # A warning is for the user to read: its message, without the line of code.
        warnings.showwarning = lambda message, *_, **__: print(
            f"warning: {message}", file=sys.stderr
        )
        return _run(parsed)


def _run(parsed: argparse.Namespace) -> int:
    """Runs the parsed command and returns its exit status."""
    if hasattr(sys.stdin, "reconfigure"):  # a question that is not UTF-8 is refused as a prompt
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
    """Draws what was kept, if that is asked for."""
    if parsed.overlay is not None:
        # Imported here: drawing needs what answering does not.
        from stepprune_jax.visualize.overlays import draw_answer

        with file_named(Path(parsed.overlay)):
            draw_answer(parsed.overlay, model, images, parsed.prompt, answer)


def command() -> NoReturn:
    """Runs the command and exits."""
    exit_with(_NAME, main)


if __name__ == "__main__":
    command()
