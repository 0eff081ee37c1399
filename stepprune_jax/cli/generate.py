"""Answers questions about images from the command line.

    stepprune-generate --model DIR --image x.jpg --prompt "What is this?"
    stepprune-generate --model DIR --questions in.jsonl --out out.jsonl

The answer is streamed, followed by the number of visual tokens kept, the time to the first token
and the decoding speed. `--json` prints one JSON object instead; `--overlay` draws the kept tokens.
A file of questions, in LLaVA's format, is answered in batches.
"""

import argparse
import dataclasses
import json
import sys
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple, NoReturn

import jax.numpy as jnp
import numpy as np
from PIL import Image

from stepprune_jax.checkpoints import folder as folders
from stepprune_jax.checkpoints.identity import load_policy_for, model_identity, policy_digest
from stepprune_jax.checkpoints.load import load_params, make_vlm
from stepprune_jax.cli.batch import answer_file, unanswered
from stepprune_jax.cli.command_line import Parser, exit_with, file_to_write, integer_from
from stepprune_jax.data.images import open_image
from stepprune_jax.data.json_files import JsonObject, file_named
from stepprune_jax.data.llava import Question, read_questions
from stepprune_jax.extras import need
from stepprune_jax.inference.base import PrefillResult, RunOptions
from stepprune_jax.inference.generate import Answer, Generator, trace_arrays
from stepprune_jax.inference.request import Request
from stepprune_jax.inference.sampling import Sampling
from stepprune_jax.inference.timing import timed_answer
from stepprune_jax.models.int8 import WEIGHTS
from stepprune_jax.models.stack import ATTENTIONS, Execution
from stepprune_jax.parallel.sharding import PRESETS, build_mesh
from stepprune_jax.pruning import POSITIONS, Budget, Pruner
from stepprune_jax.registry import PRUNERS, build_pruner, read_options
from stepprune_jax.user_input import UserError, expect, local_path, one_line, require

_NAME = "stepprune-generate"
_BATCH_SIZE = 8
_DTYPES = {"bfloat16": jnp.bfloat16, "float32": jnp.float32, "float16": jnp.float16}


class _Run(NamedTuple):
    """What the flags ask for, read once."""

    generator: Generator
    images: list[Image.Image]  # for a conversation or an overlay
    request: Request
    system: str | None
    about: JsonObject  # how answers are made
    todo: dict[int, Question]  # questions of a file that are not answered yet


class _Help(argparse.ArgumentDefaultsHelpFormatter):
    """Shows defaults, but not that there is none."""

    def _get_help_string(self, action: argparse.Action) -> str | None:
        shown = action.default not in (None, False, [])
        return super()._get_help_string(action) if shown else action.help


def _parser() -> argparse.ArgumentParser:
    parser = Parser(
        prog=_NAME,
        description=__doc__.splitlines()[0],
        formatter_class=_Help,
        compiles=True,
    )
    add = parser.add_argument_group("model").add_argument
    add("--model", required=True, help="checkpoint folder, hub id, shapes or shapes_qwen")
    add("--vision_folder", help="CLIP folder of an original LLaVA-v1.5 checkpoint")
    add("--min_pixels", type=int, help="smallest area of a resized image, if sizes vary")
    add("--max_pixels", type=int, help="largest area of a resized image")
    add = parser.add_argument_group("questions").add_argument
    add("--image", action="append", type=local_path, default=[], help="file; may be repeated")
    add("--prompt", help="the question; with --interactive, the first one")
    add("--system", help="what the system says, instead of the words of the model's template")
    add("--interactive", action="store_true", help="read questions from stdin until 'exit'")
    text = "lines with question_id, image and text"
    add("--questions", type=local_path, metavar="FILE.jsonl", help=text)
    add("--image_folder", type=local_path, help="folder of their images; default: that of the file")
    text = f"questions of a file per batch; default: {_BATCH_SIZE}"
    add("--batch_size", type=integer_from(1), help=text)
    add = parser.add_argument_group("pruning").add_argument
    add("--pruner", help=f"pruning method: {', '.join(PRUNERS)}")
    add("--policy", help="trained pruner: a file, a shipped name such as shapes, or hub:owner/name")
    add("--budget", help="tokens to keep per image: 64, 1/3, 22.2%%; default: the policy's stop")
    add("--mean_budget", type=float, help="tokens to keep on average, for a calibrated policy")
    add("--pruner_options", nargs="+", default=[], metavar="KEY=VALUE", help="e.g. fastv's layer=3")
    add("--stop_bias", type=float, help="added to the policy's stop logits instead of its own")
    add("--positions", choices=POSITIONS, default="own", help="position ids of kept tokens")
    add = parser.add_argument_group("answers").add_argument
    add("--max_tokens", type=int, default=128, help="longest answer, in tokens")
    add("--temperature", type=float, default=0.0, help="0 is greedy")
    add("--top_p", type=float, default=1.0, help="probability mass to sample from")
    add("--repetition_penalty", type=float, help="1: none; default: the model folder's")
    add("--seed", type=int, default=0, help="seed of the sampling")
    add = parser.add_argument_group("machine").add_argument
    add("--dtype", choices=tuple(_DTYPES), default="bfloat16", help="dtype of weights and compute")
    add("--weights", choices=WEIGHTS, default="full", help="int8: half the language model's memory")
    add("--mesh", help=f"sharding over all devices: {', '.join(PRESETS)}, or data=2,tensor=-1")
    add("--attention", choices=ATTENTIONS, default="matmul", help="attention implementation")
    add = parser.add_argument_group("results").add_argument
    add("--out", metavar="FILE.jsonl", help="answers to --questions; an existing one is continued")
    add("--json", action="store_true", help="print one JSON object and nothing else")
    add("--overlay", metavar="FILE.png", help="draw the kept tokens, in order of choice")
    add("--trace", metavar="FILE.npz", help="write the kept tokens of each stage, and the logits")
    return parser


def _check_flags(given: argparse.Namespace) -> None:
    """Raises if flags contradict each other, or if a file could not be written."""
    names = ("budget", "mean_budget", "stop_bias")
    amounts = [f"--{name}" for name in names if getattr(given, name) is not None]
    mean = given.mean_budget is not None or (given.budget or "").startswith("mean:")
    many = f"{' and '.join(amounts)} are given, expected one of them"
    require(not mean or len(amounts) == 1, many)
    if given.questions is not None or given.out is not None:
        _check_batch(given)
        return
    for name in ("image_folder", "batch_size"):
        require(getattr(given, name) is None, f"--{name} belongs to --questions")
    asked, once = given.prompt is not None, not given.interactive
    require(
        asked or not once, "--prompt is missing (or --interactive, to read questions from stdin)"
    )
    require(once or not given.json, "--json answers one --prompt, expected no --interactive")
    require(
        given.overlay is None or (once and bool(given.image)),
        "--overlay requires one --prompt and at least one --image",
    )
    require(given.trace is None or given.json, "--trace requires --json")
    for flag, file, suffix in (
        ("--overlay", given.overlay, ".png"),
        ("--trace", given.trace, ".npz"),
    ):
        good = file is None or (Path(file).suffix == suffix and Path(file).parent.is_dir())
        expect(flag, file, good, f"a {suffix} file in an existing folder")


def _check_batch(given: argparse.Namespace) -> None:
    """Raises if flags do not belong to a file of questions, which is answered greedily."""
    both = given.questions is not None and given.out is not None
    require(both, "--questions and --out are given together: questions, and where answers go")
    names = ("prompt", "system", "image", "interactive", "json", "overlay", "trace")
    names += ("temperature", "top_p", "repetition_penalty", "seed")
    defaults = {"temperature": 0.0, "top_p": 1.0, "seed": 0}
    for name in names:
        asked = getattr(given, name) not in (None, False, [], defaults.get(name))
        require(not asked, f"--{name} does not belong to --questions, which is answered greedily")
    given.out = file_to_write("--out", given.out)
    given.image_folder = given.image_folder or given.questions.parent


def _read(given: argparse.Namespace) -> _Run:
    """Reads and checks everything, and then loads the weights."""
    _check_flags(given)
    source = folders.inspect_folder(
        given.model,
        given.vision_folder,
        min_pixels=given.min_pixels,
        max_pixels=given.max_pixels,
    )
    settings = source.backbone.image_settings(source.vision_folder or source.folder)
    model = make_vlm(source, {}, folders.load_tokenizer(source.folder), settings)
    mean = given.mean_budget
    policy = None if given.policy is None else load_policy_for(source, given.policy)
    pruner = build_pruner(
        given.pruner,
        given.budget if mean is None else Budget("mean", mean),
        policy=policy,
        stop_bias=given.stop_bias,
        options=read_options("--pruner_options", given.pruner_options),
    )
    sampling = Sampling(
        given.seed,
        given.temperature,
        given.top_p,
        repetition_penalty=given.repetition_penalty,
    )
    execution = Execution(attention=given.attention)
    options = RunOptions(given.max_tokens, given.positions, execution=execution)
    generator = Generator(model, pruner, sampling, options)
    # Paths, so that errors name the file.
    asked = "?" if given.prompt is None else given.prompt
    request = generator.read([asked], [given.image], system=given.system)
    about, todo = _about(given, pruner), {}
    if given.overlay is not None:
        need("matplotlib", "--overlay draws")
    again = given.interactive or given.overlay is not None
    images = [open_image(path, as_shown=True) for path in given.image] if again else []
    mesh = None if given.mesh is None else build_mesh(given.mesh)
    if given.questions is not None:
        folder, questions = given.image_folder, read_questions(given.questions, given.image_folder)
        about["weights"] = model_identity(source)[:16]  # a download of the weights, if on the hub
        about["policy_weights"] = None if policy is None else policy_digest(policy)
        todo = unanswered(given.out, questions, folder, about)
    nothing = given.questions is not None and not todo
    params = {}
    if not nothing:
        params = load_params(source, mesh, _DTYPES[given.dtype], weights=given.weights)
    generator = dataclasses.replace(generator, model=model._replace(params=params))
    return _Run(generator, images, request, given.system, about, todo)


def _about(given: argparse.Namespace, pruner: Pruner) -> JsonObject:
    """Says how answers are made, for those who read them."""
    return {
        "model": given.model,
        "vision_folder": given.vision_folder,
        "min_pixels": given.min_pixels,
        "max_pixels": given.max_pixels,
        "system": given.system,
        "policy": given.policy,
        "pruner": pruner.name,
        "pruner_version": pruner.version,
        "pruner_options": read_options("--pruner_options", given.pruner_options),
        "budget": str(pruner.budget),
        "budget_counts": pruner.budget_counts,
        "stop_bias": given.stop_bias,
        "positions": given.positions,
        "max_tokens": given.max_tokens,
        "dtype": given.dtype,
        "language_weights": given.weights,
    }


def _stream(run: _Run, request: Request) -> Answer:
    """Prints an answer token by token, and then its figures."""
    found, times = timed_answer(
        run.generator, request, lambda piece: print(piece, end="", flush=True)
    )
    kept = f"kept {found.kept} of {found.visual_tokens} visual tokens"
    print(f"\n[{kept}, {times}]", flush=True)
    return found


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


def _converse(run: _Run, first: str | None) -> None:
    """Answers question after question; the images and the conversation are kept."""
    turns: list[str] = []
    for question in _questions(first):
        try:
            turns_now = [[*turns, question]]
            request = run.generator.read(turns_now, [run.images], system=run.system)
            found = _stream(run, request)
        except UserError as error:
            print(f"{_NAME}: error: {one_line(error)}", file=sys.stderr, flush=True)
            continue
        turns += [question, found.text]


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs the command."""

    def show(message: Warning | str, *_: object, **__: object) -> None:
        print(f"warning: {one_line(message)}", file=sys.stderr)

    with warnings.catch_warnings():
        # Warnings are shown to the user without the line of code.
        warnings.showwarning = show
        _execute(_parser().parse_args(arguments))


def _execute(given: argparse.Namespace) -> None:
    """Runs the parsed command."""
    if hasattr(sys.stdin, "reconfigure"):  # a question that is not UTF-8 is rejected as a prompt
        sys.stdin.reconfigure(errors="surrogateescape")
    run = _read(given)
    if given.questions is not None:
        if not run.todo:
            print(f"{given.out} has an answer to every question", file=sys.stderr)
            return
        size = given.batch_size or _BATCH_SIZE
        answer_file(run.generator, run.todo, given.image_folder, given.out, run.about, size)
        return
    if given.interactive:
        _converse(run, given.prompt)
        return
    if given.json:

        def save(begun: PrefillResult) -> None:
            if given.trace is not None:
                with file_named(Path(given.trace)):
                    np.savez_compressed(given.trace, **trace_arrays(begun))

        found, times = timed_answer(run.generator, run.request, trace=save)
        measured = {
            "ttft_ms": 1000 * times.first_token,
            "compile_ms": 1000 * times.compiling,
            "tokens_per_s": times.tokens_per_s,
        }
        print(json.dumps(run.about | found._asdict() | measured))
    else:
        found = _stream(run, run.request)
    if given.overlay is not None:
        # Imported here: answering does not need these packages.
        from stepprune_jax.visualize.overlays import draw_answer

        with file_named(Path(given.overlay)):
            draw_answer(given.overlay, run.generator.model, run.images, given.prompt, found)


def command() -> NoReturn:
    """Runs the command and exits."""
    exit_with(_NAME, main)


if __name__ == "__main__":
    command()
