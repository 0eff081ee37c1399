"""Answers questions about images from the command line.

    stepprune-generate --model DIR --image x.jpg --prompt "What is this?"
    stepprune-generate --model DIR --questions in.jsonl --out out.jsonl

The command streams the answer, and then prints the number of kept visual tokens, the time to the
first token and the decoding speed. `--json` prints one JSON object instead, and `--overlay` draws
the kept tokens. `--questions` answers a file of questions in LLaVA's format, in batches.
"""

import argparse
import dataclasses
import functools
import io
import json
import sys
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from PIL import Image

from stepprune_jax.checkpoints import folder as folders
from stepprune_jax.checkpoints.identity import load_policy_for, model_identity, policy_digest
from stepprune_jax.checkpoints.load import load_params, make_vlm
from stepprune_jax.cli import model_flags
from stepprune_jax.cli.batch import answer_file, unanswered_questions
from stepprune_jax.cli.command_line import exit_with
from stepprune_jax.cli.flags.generate import BATCH_SIZE, NAME, parse
from stepprune_jax.data.images import open_image
from stepprune_jax.data.json_files import JsonObject, file_named
from stepprune_jax.data.llava import Question, read_questions
from stepprune_jax.data.videos import Video
from stepprune_jax.extras import need
from stepprune_jax.inference.base import PrefillResult, RunOptions
from stepprune_jax.inference.generate import Answer, Generator, trace_arrays
from stepprune_jax.inference.request import Request
from stepprune_jax.inference.sampling import Sampling
from stepprune_jax.inference.timing import timed_answer
from stepprune_jax.models.stack import Execution
from stepprune_jax.parallel.sharding import build_mesh
from stepprune_jax.pruning import Budget, Pruner
from stepprune_jax.registry import build_pruner, read_options, resolve_pruner, user_digest
from stepprune_jax.selectors import TrainedPruner
from stepprune_jax.user_input import UserError, one_line


class _Job(NamedTuple):
    """The checked input of the command. Made by `_read_job`.

    Attributes:
        generator: model, pruner and settings of the answers.
        request: tokenized `--prompt` with the preprocessed images of `--image`.
        images: the videos, and the decoded images for a conversation or an overlay.
        system: system prompt; None for the system prompt of the model's template.
        settings: the flags that determine answers, for the output.
        questions: the questions of `--questions` that the file `--out` does not yet answer. Keys
            are indices in `--questions`.
    """

    generator: Generator
    request: Request
    images: list[Image.Image | Video]
    system: str | None
    settings: JsonObject
    questions: dict[int, Question]


def _read_job(flags: argparse.Namespace) -> _Job:
    """Reads and checks all input, and then loads the weights of the model.

    All checks use a generator without weights, because loading weights takes long.

    Args:
        flags: the parsed flags.

    Returns:
        The input. The weights are not loaded if all questions of a file have answers.

    Raises:
        UserError: a flag is invalid, or does not suit the model.
    """
    if flags.overlay is not None:
        need("matplotlib", "--overlay draws")
    flags.pruner = resolve_pruner(flags.pruner)
    source = folders.inspect_folder(flags.model, **model_flags.image_options(flags))
    policy = None if flags.policy is None else load_policy_for(source, flags.policy)
    generator = _build_generator(flags, source, policy)
    # Without --prompt, a placeholder checks the images and the system prompt.
    prompt = "?" if flags.prompt is None else flags.prompt
    # Images are paths here, so error messages name the file.
    videos = [Video(path, flags.fps, flags.num_frames) for path in flags.video]
    request = generator.read([prompt], [[*videos, *flags.image]], system=flags.system)
    settings, questions = _answer_settings(flags, generator.pruner), {}
    needs_images = flags.interactive or flags.overlay is not None
    images = [open_image(path, as_shown=True) for path in flags.image] if needs_images else []
    images = [*videos, *images]
    mesh = None if flags.mesh is None else build_mesh(flags.mesh)
    if flags.questions is not None:
        sampling = {"fps": flags.fps, "num_frames": flags.num_frames}
        all_questions = read_questions(flags.questions, flags.image_folder, **sampling)
        if any(question.video is not None for question in all_questions):
            settings |= sampling
        settings["weights"] = model_identity(source)[:16]  # Downloads the weights of a hub model.
        settings["policy_weights"] = None if policy is None else policy_digest(policy)
        questions = unanswered_questions(flags.out, all_questions, flags.image_folder, settings)
    params = {}
    if flags.questions is None or questions:
        params = load_params(source, mesh, jnp.dtype(flags.dtype), weights=flags.weights)
    generator = dataclasses.replace(generator, model=generator.model._replace(params=params))
    return _Job(generator, request, images, flags.system, settings, questions)


def _build_generator(
    flags: argparse.Namespace, source: folders.ModelFolder, policy: TrainedPruner | None
) -> Generator:
    """Builds model, pruner and settings from the flags, without the weights of the model.

    Args:
        flags: the parsed flags.
        source: the inspected folder of the model.
        policy: the policy of --policy, or None.

    Raises:
        UserError: the model does not support the pruner or a setting.
    """
    image_settings = source.backbone.image_settings(source.vision_folder or source.folder)
    model = make_vlm(source, {}, folders.load_tokenizer(source.folder), image_settings)
    pruner = build_pruner(
        flags.pruner,
        flags.budget if flags.mean_budget is None else Budget("mean", flags.mean_budget),
        policy=policy,
        stop_bias=flags.stop_bias,
        options=read_options("--pruner_options", flags.pruner_options),
    )
    penalty = flags.repetition_penalty
    sampling = Sampling(flags.seed, flags.temperature, flags.top_p, repetition_penalty=penalty)
    execution = Execution(attention=flags.attention)
    options = RunOptions(flags.max_tokens, flags.positions, execution=execution)
    return Generator(model, pruner, sampling, options)


def _answer_settings(flags: argparse.Namespace, pruner: Pruner) -> JsonObject:
    """Returns the settings that determine answers, for `--json` and each line of an answer file.

    Args:
        flags: the parsed flags.
        pruner: the pruner that the flags describe.
    """
    source_digest = user_digest(pruner.name)
    return {
        "model": flags.model,
        **model_flags.image_options(flags),
        "system": flags.system,
        "policy": flags.policy,
        "pruner": pruner.name,
        "pruner_version": pruner.version,
        **({} if source_digest is None else {"pruner_source": source_digest}),
        "pruner_options": read_options("--pruner_options", flags.pruner_options),
        "budget": str(pruner.budget),
        "budget_counts": pruner.budget_counts,
        "stop_bias": flags.stop_bias,
        "positions": flags.positions,
        "max_tokens": flags.max_tokens,
        "dtype": flags.dtype,
        "language_weights": flags.weights,
    }


def _stream_answer(job: _Job, request: Request) -> Answer:
    """Prints an answer token by token, and then its token counts and times; returns the answer."""
    write = functools.partial(print, end="", flush=True)
    answer, times = timed_answer(job.generator, request, write)
    counts = f"kept {answer.kept} of {answer.visual_tokens} visual tokens"
    print(f"\n[{counts}, {times}]", flush=True)
    return answer


def _read_stdin(first_question: str | None) -> Iterator[str]:
    """Yields questions: the first question, if any, and then the lines of stdin.

    Ends at the end of stdin or at a line "exit". Skips empty lines.

    Args:
        first_question: value of --prompt, which may be None.
    """
    if first_question is not None:
        yield first_question
    while sys.stdin is not None:  # `<&-` closes stdin.
        if sys.stdin.isatty():
            print("> ", end="", file=sys.stderr, flush=True)
        line = sys.stdin.readline()
        if not line or line.strip() == "exit":
            return
        if line.strip():
            yield line.strip()


def _converse(job: _Job, first_question: str | None) -> None:
    """Answers questions from stdin as one conversation about the same images.

    A question that causes an error, such as a too long conversation, is reported and skipped.

    Args:
        job: model, settings and images.
        first_question: value of --prompt, which may be None.
    """
    previous_turns: list[str] = []  # Questions and answers in turn.
    for question in _read_stdin(first_question):
        try:
            turns = [*previous_turns, question]
            request = job.generator.read([turns], [job.images], system=job.system)
            answer = _stream_answer(job, request)
        except UserError as error:
            print(f"{NAME}: error: {one_line(error)}", file=sys.stderr, flush=True)
            continue
        previous_turns += [question, answer.text]


def main(arguments: Sequence[str] | None = None) -> None:
    """Answers questions about images, and prints or writes the answers.

    Args:
        arguments: command-line arguments; None reads the arguments of the process.
    """

    def show_warning(message: Warning | str, *_: object, **__: object) -> None:
        print(f"warning: {one_line(message)}", file=sys.stderr)

    with warnings.catch_warnings():
        # The user sees warnings without the line of code that Python would add.
        warnings.showwarning = show_warning
        _execute(parse(arguments))


def _execute(flags: argparse.Namespace) -> None:
    """Runs the command: answers a file of questions, a conversation, or one prompt."""
    # The tokenizer reports questions with invalid UTF-8, so decoding stdin must not fail.
    if isinstance(sys.stdin, io.TextIOWrapper):
        sys.stdin.reconfigure(errors="surrogateescape")
    job = _read_job(flags)
    if flags.questions is not None:
        if not job.questions:
            print(f"{flags.out} has an answer to every question", file=sys.stderr)
            return
        answer_file(
            job.generator,
            job.questions,
            folder=flags.image_folder,
            out=flags.out,
            provenance=job.settings,
            batch_size=flags.batch_size or BATCH_SIZE,
        )
    elif flags.interactive:
        _converse(job, flags.prompt)
    else:
        answer = _print_json(job, flags.trace) if flags.json else _stream_answer(job, job.request)
        if flags.overlay is not None:
            # Imported here because only an overlay needs the packages for drawing.
            from stepprune_jax.visualize.overlays import draw_answer

            with file_named(Path(flags.overlay)):
                model = job.generator.model
                images = [image for image in job.images if not isinstance(image, Video)]
                draw_answer(flags.overlay, model, images, flags.prompt, answer)


def _print_json(job: _Job, trace_file: str | None) -> Answer:
    """Answers the prompt, and prints settings, answer and times as one JSON object.

    Args:
        job: the checked input of the command.
        trace_file: file for the kept tokens of each stage and the logits; None saves no trace.

    Returns:
        The answer.
    """

    def save_trace(prefill: PrefillResult) -> None:
        if trace_file is not None:
            with file_named(Path(trace_file)):
                np.savez_compressed(trace_file, allow_pickle=False, **trace_arrays(prefill))

    answer, times = timed_answer(job.generator, job.request, trace=save_trace)
    measurements = {
        "ttft_ms": 1000 * times.first_token,
        "compile_ms": 1000 * times.compiling,
        "tokens_per_s": times.tokens_per_s,
    }
    fields = answer._asdict() | {"kept_per_patch": answer.kept_per_patch}
    print(json.dumps(job.settings | fields | measurements))
    return answer


def command() -> None:
    """Runs the command and exits with its status."""
    exit_with(NAME, main)


if __name__ == "__main__":
    command()
