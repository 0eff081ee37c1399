"""Answers the questions of other evaluation programs with the pipeline of our benchmarks."""

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
from stepprune_jax.user_input import UserError, expect

DTYPES = ("bfloat16", "float32", "float16")
_logger = logging.getLogger(__name__)
_GREEDY = Sampling(repetition_penalty=1.0)


@dataclasses.dataclass(frozen=True, kw_only=True)
class AnswererOptions:
    """Options of `load_answerer`.

    Attributes:
        pretrained: checkpoint folder, hub id, or the name of a shipped model such as "shapes".
        policy: policy file, or the name of a shipped policy.
        method: a name of `PRUNERS`, or "policy" for the policy's method. None is "policy" if there
            is a policy, and "all" otherwise.
        budget: tokens to keep per image, as `Budget.parse` reads it; None uses the learned stop.
        stop_bias: bias of the policy's stop logits; None uses the bias in the policy file.
        vision_folder: CLIP folder of an original LLaVA-v1.5 checkpoint.
        dtype: dtype of the model: "bfloat16", "float32" or "float16".
        mesh: preset of `build_mesh`.
        batch_size: questions per batch on each device.
        positions: position ids of kept tokens: "own" (as in the method's paper), "original" or
            "compact".
        attention: "matmul", "xla" or "cudnn".
        seed: seed of a method that keeps random tokens.
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
        text: the user's message. `<image>` marks the places of several images. Without marks, the
            images precede the text. A single image always precedes the text.
        images: the images.
        max_new_tokens: length limit of the answer.
        until: strings that end the answer. The answer does not include them.
    """

    text: str
    images: tuple[Image.Image, ...]
    max_new_tokens: int
    until: tuple[str, ...] = ()


class Answerer(NamedTuple):
    """A model with its pruning method. Made by `load_answerer`.

    Attributes:
        generator: model and pruner.
        batch_size: questions per batch over all devices.
    """

    generator: Generator
    batch_size: int


def load_answerer(settings: AnswererOptions) -> Answerer:
    """Checks the settings, and then loads the model.

    Raises:
        FileNotFoundError: model or policy is missing.
        UserError: a setting is invalid or contradicts another setting.
    """
    batch_size, dtype = settings.batch_size, settings.dtype
    expect("dtype", dtype, dtype in DTYPES, f"one of {', '.join(DTYPES)}")
    expect("batch_size", batch_size, is_count(batch_size), "an integer from 1")
    if settings.method == "policy" and settings.policy is None:
        raise UserError("method 'policy' needs a policy: set policy, or choose another method")
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
    mesh = None if settings.mesh == "single" else build_mesh(settings.mesh)
    model = load_vlm(
        settings.pretrained, mesh, jnp.dtype(dtype), vision_folder=settings.vision_folder
    )
    batch_size *= row_count(mesh_of(model.params))
    return Answerer(Generator(model, pruner, _GREEDY, options), batch_size)


def answer_questions(
    answerer: Answerer,
    questions: Sequence[AskedQuestion],
    report: Callable[[int], None] = lambda num_done: None,
) -> list[str]:
    """Answers questions greedily.

    Questions with the same length limit share batches. A question with several images runs by
    itself. If the number of a question's marks differs from the number of its images, the marks are
    removed and the images precede the text; one warning counts these questions.

    Args:
        answerer: model and method.
        questions: the questions.
        report: called after each chunk with the number of answered questions.

    Returns:
        One answer per question.

    Raises:
        UserError: a length limit is below 1, or an image cannot be read.
    """
    limits = sorted({question.max_new_tokens for question in questions})
    for max_new_tokens in limits:
        expect("max_new_tokens", max_new_tokens, max_new_tokens >= 1, "an integer from 1")
    questions = _with_usable_marks(questions)
    max_chunk = chunk_size(answerer.generator.model, answerer.batch_size)
    answers, num_done = [""] * len(questions), 0

    def store(chunk: Sequence[int], texts: Sequence[str]) -> None:
        """Stores the answers to the questions `chunk`, and reports the progress."""
        nonlocal num_done
        for index, text in zip(chunk, texts, strict=True):
            answers[index] = cut_at(text, questions[index].until)
        num_done += len(chunk)
        report(num_done)

    for max_new_tokens in limits:
        batched = []
        for index, question in enumerate(questions):
            if question.max_new_tokens != max_new_tokens:
                continue
            if len(question.images) > 1:
                store([index], [_answer_one(answerer, question, max_new_tokens)])
            else:
                batched.append(index)
        for start in range(0, len(batched), max_chunk):
            chunk = batched[start : start + max_chunk]
            chunk_questions = [_convert_question(index, questions[index]) for index in chunk]
            store(chunk, _answer_chunk(answerer, chunk_questions, max_new_tokens))
    return answers


def _with_usable_marks(questions: Sequence[AskedQuestion]) -> list[AskedQuestion]:
    """Returns the questions with marks only where several images have one mark each."""
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


def _convert_question(number: int, question: AskedQuestion) -> BenchmarkQuestion:
    """Converts a question to a benchmark question, with the image as the bytes of a PNG file.

    Equal images have equal bytes, so they pass the tower once.
    """
    image = None
    if question.images:
        file = io.BytesIO()
        open_image(question.images[0]).save(file, "PNG", compress_level=1)
        image = file.getvalue()
    return BenchmarkQuestion(number, question.text, question.text, image)


def _answer_one(answerer: Answerer, question: AskedQuestion, max_new_tokens: int) -> str:
    """Answers a question about several images in a batch of one row."""
    generator = _with_max_tokens(answerer.generator, max_new_tokens)
    request = generator.read([question.text], [question.images], as_shown=False)
    return generator.answer(request)[0].text


def _answer_chunk(
    answerer: Answerer, questions: Sequence[BenchmarkQuestion], max_new_tokens: int
) -> list[str]:
    """Answers questions with at most one image. A shared image passes the tower once."""
    generator = _with_max_tokens(answerer.generator, max_new_tokens)
    images = [question.image for question in questions if question.image is not None]
    encoded = encode_questions(
        generator.model,
        questions,
        batch_size=answerer.batch_size,
        taps=generator.pruner.taps(generator.model.config),
        execution=generator.options.execution,
        tower=len(set(images)) < len(images),
        numbers=[question.question_id for question in questions],
    )
    (answers,) = generator.answer_set(encoded, Batching(answerer.batch_size, widths=WIDTHS))
    return answers.texts


def _with_max_tokens(generator: Generator, max_new_tokens: int) -> Generator:
    """Returns the generator with another length limit of answers."""
    options = dataclasses.replace(generator.options, max_tokens=max_new_tokens)
    return dataclasses.replace(generator, options=options)


def cut_at(text: str, until: Sequence[str]) -> str:
    """Returns a text up to the first occurrence of a string in `until`. Ignores empty strings."""
    ends = [text.find(stop_text) for stop_text in until if stop_text and stop_text in text]
    return text[: min(ends)] if ends else text
