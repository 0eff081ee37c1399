"""Answers to another program's questions, by the pipeline of our own benchmarks."""

import dataclasses
import io
import logging
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import jax.numpy as jnp
from PIL import Image

from stepprune_jax.benchmarks.questions import BenchmarkQuestion
from stepprune_jax.checkpoints import folder as folders
from stepprune_jax.checkpoints.identity import load_policy_for
from stepprune_jax.checkpoints.load import load_vlm
from stepprune_jax.data.images import open_image
from stepprune_jax.data.prompts import IMAGE_MARK
from stepprune_jax.inference.base import RunOptions
from stepprune_jax.inference.dataset import Batching
from stepprune_jax.inference.encode import WIDTHS, chunk_size, encode_questions
from stepprune_jax.inference.generate import Generator, check_run
from stepprune_jax.inference.sampling import Sampling
from stepprune_jax.models.stack import Execution
from stepprune_jax.parallel.placement import mesh_of, row_count
from stepprune_jax.parallel.sharding import build_mesh
from stepprune_jax.registry import PRUNERS, build_pruner
from stepprune_jax.settings import is_count
from stepprune_jax.user_input import expect, require

DTYPES = ("bfloat16", "float32", "float16")
_logger = logging.getLogger(__name__)
_GREEDY = Sampling(repetition_penalty=1.0)


@dataclasses.dataclass(frozen=True, kw_only=True)
class AnswererOptions:
    """What an answerer is loaded from, and how it runs.

    Attributes:
        pretrained: checkpoint folder, hub id, or the name of a shipped model, "shapes".
        policy: policy file, or the name of a shipped policy.
        method: a name of `PRUNERS`, or "policy" for that of the policy, which is the default with
            one; without one it is "all".
        budget: tokens to keep per image, as read by `Budget.parse`; without it a policy stops by
            itself.
        stop_bias: number added to the policy's stop logits, instead of its own bias.
        vision_folder: CLIP folder of an original LLaVA-v1.5 checkpoint.
        dtype: dtype of the model: "bfloat16", "float32" or "float16".
        mesh: preset of `build_mesh`.
        batch_size: questions per batch on each device.
        positions: position ids of kept tokens: "own", those of the method's authors, "original" or
            "compact".
        attention: "matmul", "xla" or "cudnn".
        seed: seed of random tokens.
    """

    pretrained: str | Path
    policy: str | Path | None = None
    method: str | None = None
    budget: int | str | None = None
    stop_bias: float | int | None = None
    vision_folder: str | Path | None = None
    dtype: str = "bfloat16"
    mesh: str = "single"
    batch_size: int = 1
    positions: str = "own"
    attention: str = "matmul"
    seed: int = 0


class AskedQuestion(NamedTuple):
    """A question of another program.

    Attributes:
        text: the user's message. Several images stand where `<image>` marks them. Without marks,
            images stand in front of the text, as a single image always does.
        images: the images.
        max_new_tokens: longest answer.
        until: strings that end the answer and are not part of it.
    """

    text: str
    images: tuple[Image.Image, ...]
    max_new_tokens: int
    until: tuple[str, ...] = ()


class Answerer(NamedTuple):
    """A model with its pruning method; `batch_size` questions per batch, over all devices."""

    generator: Generator
    batch_size: int


def load_answerer(settings: AnswererOptions) -> Answerer:
    """Checks the settings, and then loads the model.

    Raises:
        FileNotFoundError: model or policy is missing.
        ValueError: a setting has a bad value, or contradicts another one.
    """
    size, dtype, known = settings.batch_size, settings.dtype, settings.policy is not None
    expect("dtype", dtype, dtype in DTYPES, f"one of {', '.join(DTYPES)}")
    expect("batch_size", size, is_count(size), "an integer from 1")
    require(settings.method != "policy" or known, "method 'policy' needs a policy")
    is_random = settings.method in PRUNERS and PRUNERS[settings.method].is_random
    source = folders.inspect_folder(settings.pretrained, settings.vision_folder)
    pruner = build_pruner(
        None if settings.method == "policy" else settings.method,
        settings.budget,
        policy=None if settings.policy is None else load_policy_for(source, settings.policy),
        stop_bias=settings.stop_bias,
        options={"seed": settings.seed} if is_random else None,
    )
    execution = Execution(attention=settings.attention)
    options = RunOptions(positions=settings.positions, execution=execution)
    check_run(source.config, pruner, Sampling(), options)
    devices = None if settings.mesh == "single" else build_mesh(settings.mesh)
    model = load_vlm(
        settings.pretrained, devices, jnp.dtype(dtype), vision_folder=settings.vision_folder
    )
    size *= row_count(mesh_of(model.params))
    return Answerer(Generator(model, pruner, _GREEDY, options), size)


def answer_questions(
    answerer: Answerer,
    wanted: Sequence[AskedQuestion],
    report: Callable[[int], None] = lambda done: None,
) -> list[str]:
    """Answers questions greedily.

    Args:
        answerer: model and method.
        wanted: the questions; those with the same longest answer share batches, unless they have
            several images.
        report: called with the number of questions done, chunk by chunk.

    Returns:
        One answer per question. A warning counts the questions whose marks do not match their
        images: their marks are dropped, and their images stand in front.

    Raises:
        ValueError: a longest answer below 1, or an image that cannot be read.
    """
    for most in {w.max_new_tokens for w in wanted}:
        expect("max_new_tokens", most, most >= 1, "an integer from 1")
    wanted = _with_usable_marks(wanted)
    texts, done = [""] * len(wanted), 0
    for longest in sorted({w.max_new_tokens for w in wanted}):
        alike = [place for place, w in enumerate(wanted) if w.max_new_tokens == longest]
        for place in [place for place in alike if len(wanted[place].images) > 1]:
            alike.remove(place)
            text = _answer_alone(answerer, wanted[place], longest)
            texts[place], done = cut_at(text, wanted[place].until), done + 1
            report(done)
        size = chunk_size(answerer.generator.model, answerer.batch_size)
        for first in range(0, len(alike), size):
            places = alike[first : first + size]
            asked = [_question(place, wanted[place]) for place in places]
            for place, text in zip(places, _answer_chunk(answerer, asked, longest), strict=True):
                texts[place] = cut_at(text, wanted[place].until)
            done += len(places)
            report(done)
    return texts


def _with_usable_marks(questions: Sequence[AskedQuestion]) -> list[AskedQuestion]:
    """Keeps the marks of several images if there is one for each, and drops all other marks."""
    usable, mismatched = [], []
    for question in questions:
        mark_count, image_count = question.text.count(IMAGE_MARK), len(question.images)
        if mark_count not in (0, image_count):
            mismatched.append(question)
        if mark_count and not mark_count == image_count > 1:
            question = question._replace(text=question.text.replace(IMAGE_MARK, "").strip())
        usable.append(question)
    if mismatched:
        text, images, *_ = mismatched[0]
        _logger.warning(
            "%d of %d questions: %d %s mark(s) for %d image(s) in %.80r, for example; their marks "
            "are dropped, and their images stand in front",
            len(mismatched),
            len(questions),
            text.count(IMAGE_MARK),
            IMAGE_MARK,
            len(images),
            text,
        )
    return usable


def _question(number: int, wanted: AskedQuestion) -> BenchmarkQuestion:
    """Converts a question to a benchmark question; equal images go through the tower once."""
    image = None
    if wanted.images:
        out = io.BytesIO()
        open_image(wanted.images[0]).save(out, "PNG", compress_level=1)
        image = out.getvalue()
    return BenchmarkQuestion(number, wanted.text, wanted.text, image)


def _answer_alone(answerer: Answerer, wanted: AskedQuestion, longest: int) -> str:
    """Answers a question about several images as the others, but in a batch of its own."""
    generator = _with_longest(answerer.generator, longest)
    request = generator.read([wanted.text], [wanted.images], as_shown=False)
    return generator.answer(request)[0].text


def _answer_chunk(
    answerer: Answerer, asked: Sequence[BenchmarkQuestion], longest: int
) -> list[str]:
    """Answers questions; an image shared by several goes through the tower once."""
    generator = _with_longest(answerer.generator, longest)
    seen = [question.image for question in asked if question.image is not None]
    encoded = encode_questions(
        generator.model,
        asked,
        batch_size=answerer.batch_size,
        taps=generator.pruner.taps(generator.model.config),
        execution=generator.options.execution,
        tower=len(set(seen)) < len(seen),
        numbers=[question.question_id for question in asked],
    )
    (answers,) = generator.answer_set(encoded, Batching(answerer.batch_size, widths=WIDTHS))
    return answers.texts


def _with_longest(generator: Generator, longest: int) -> Generator:
    """Returns the generator with another longest answer."""
    options = dataclasses.replace(generator.options, max_tokens=longest)
    return dataclasses.replace(generator, options=options)


def cut_at(text: str, until: Sequence[str]) -> str:
    """Returns the answer up to the first of the strings that end it; empty ones are ignored."""
    places = [text.find(end) for end in until if end and end in text]
    return text[: min(places)] if places else text
