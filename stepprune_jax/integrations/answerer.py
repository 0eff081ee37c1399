"""Answers the questions of other evaluation programs, as this package answers its benchmarks."""

import dataclasses
import io
import logging
from collections.abc import Callable, Mapping, Sequence
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
from stepprune_jax.registry import PRUNERS, build_pruner, resolve_pruner
from stepprune_jax.settings import is_count
from stepprune_jax.user_input import UserError, expect

DTYPES = ("bfloat16", "float32", "float16")
_logger = logging.getLogger(__name__)
_GREEDY = Sampling(repetition_penalty=1.0)  # Overrides the penalty of the model's folder.


@dataclasses.dataclass(frozen=True, kw_only=True)
class AnswererOptions:
    """Options of `load_answerer`.

    Attributes:
        pretrained: checkpoint folder, hub id, or the name of a shipped model such as "shapes".
        policy: policy file, or the name of a shipped policy.
        method: a text for `resolve_pruner`, such as "fastv" or "norm.py:Norm", or "policy" for the
            policy's method. None is "policy" if there is a policy, and "all" otherwise.
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
    """A question of another evaluation program.

    Attributes:
        text: the user's message. With several images, `<image>` may mark the place of each image.
            Without marks, the images precede the text. A single image always precedes the text.
        images: the images of the message.
        max_new_tokens: largest number of tokens of the answer.
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
    """Checks the options, and then loads the model.

    Args:
        settings: model, pruning method and how the model is run.

    Raises:
        FileNotFoundError: model or policy is missing.
        UserError: a setting is invalid or contradicts another setting.
    """
    batch_size, dtype = settings.batch_size, settings.dtype
    expect("dtype", dtype, dtype in DTYPES, f"one of {', '.join(DTYPES)}")
    expect("batch_size", batch_size, is_count(batch_size), "an integer from 1")
    if settings.method == "policy" and settings.policy is None:
        raise UserError("method 'policy' needs a policy: set policy, or choose another method")
    method = None if settings.method == "policy" else resolve_pruner(settings.method)
    is_random = method in PRUNERS and PRUNERS[method].is_random
    source = folders.inspect_folder(settings.pretrained, settings.vision_folder)
    pruner = build_pruner(
        method,
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
    report: Callable[[int], object] = lambda num_answered: None,
) -> list[str]:
    """Answers questions greedily.

    Questions with the same length limit share batches. A question with several images is answered
    in a batch of one row. If the number of a question's `<image>` marks differs from the number of
    its images, the marks are removed and the images precede the text. One warning counts these
    questions.

    Args:
        answerer: model and method.
        questions: the questions.
        report: called after each chunk of questions with the number of answered questions.

    Returns:
        One answer per question, in the order of `questions`.

    Raises:
        UserError: a length limit is below 1, or an image cannot be read.
    """
    length_limits = sorted({question.max_new_tokens for question in questions})
    for max_new_tokens in length_limits:
        expect("max_new_tokens", max_new_tokens, max_new_tokens >= 1, "an integer from 1")
    questions = _remove_unusable_marks(questions)
    max_chunk_length = chunk_size(answerer.generator.model, answerer.batch_size)
    answers, num_answered = [""] * len(questions), 0

    def store_answers(indices: Sequence[int], texts: Sequence[str]) -> None:
        """Stores the answers to the questions with these indices, and reports the progress."""
        nonlocal num_answered
        for index, text in zip(indices, texts, strict=True):
            answers[index] = cut_at(text, questions[index].until)
        num_answered += len(indices)
        report(num_answered)

    for max_new_tokens in length_limits:
        options = dataclasses.replace(answerer.generator.options, max_tokens=max_new_tokens)
        generator = dataclasses.replace(answerer.generator, options=options)
        batched_indices = []
        for index, question in enumerate(questions):
            if question.max_new_tokens != max_new_tokens:
                continue
            if len(question.images) > 1:
                request = generator.read([question.text], [question.images], as_shown=False)
                store_answers([index], [generator.answer(request)[0].text])
            else:
                batched_indices.append(index)
        for start in range(0, len(batched_indices), max_chunk_length):
            indices = batched_indices[start : start + max_chunk_length]
            chunk = {index: _convert_question(index, questions[index]) for index in indices}
            store_answers(indices, _answer_chunk(generator, chunk, answerer.batch_size))
    return answers


def _remove_unusable_marks(questions: Sequence[AskedQuestion]) -> list[AskedQuestion]:
    """Removes the `<image>` marks of questions, except where several images have one mark each.

    One warning counts the questions whose numbers of marks and images differ.

    Args:
        questions: the questions.

    Returns:
        The questions in the same order.
    """
    usable_questions, mismatched_questions = [], []
    for question in questions:
        num_marks, num_images = question.text.count(IMAGE_MARK), len(question.images)
        if num_marks not in (0, num_images):
            mismatched_questions.append(question)
        is_usable = num_marks == 0 or num_marks == num_images > 1
        if not is_usable:
            question = question._replace(text=question.text.replace(IMAGE_MARK, "").strip())
        usable_questions.append(question)
    if mismatched_questions:
        example = mismatched_questions[0]
        _logger.warning(
            "%d of %d questions: %d %s mark(s) for %d image(s) in %.80r, for example; their marks "
            "are dropped, and their images stand in front",
            len(mismatched_questions),
            len(questions),
            example.text.count(IMAGE_MARK),
            IMAGE_MARK,
            len(example.images),
            example.text,
        )
    return usable_questions


def _convert_question(index: int, question: AskedQuestion) -> BenchmarkQuestion:
    """Converts a question with at most one image to a benchmark question.

    The image becomes the bytes of a PNG file. Equal images have equal bytes, so the vision tower
    runs once for an image that several questions share.

    Args:
        index: index of the question, its id.
        question: the question.
    """
    image_bytes = None
    if question.images:
        file = io.BytesIO()
        open_image(question.images[0]).save(file, "PNG", compress_level=1)
        image_bytes = file.getvalue()
    return BenchmarkQuestion(index, question.text, question.text, image_bytes)


def _answer_chunk(
    generator: Generator, questions: Mapping[int, BenchmarkQuestion], batch_size: int
) -> list[str]:
    """Answers questions with at most one image each, in batches.

    Args:
        generator: model, method, and length limit of the answers.
        questions: results of `_convert_question` by the indices of the questions.
        batch_size: questions per batch over all devices.

    Returns:
        One text per question.
    """
    images = [question.image for question in questions.values() if question.image is not None]
    has_shared_images = len(set(images)) < len(images)
    encoded = encode_questions(
        generator.model,
        [*questions.values()],
        batch_size=batch_size,
        taps=generator.pruner.taps(generator.model.config),
        execution=generator.options.execution,
        tower=has_shared_images,  # The tower runs separately, once per distinct image.
        numbers=[*questions],
    )
    (answers,) = generator.answer_set(encoded, Batching(batch_size, widths=WIDTHS))
    return answers.texts


def cut_at(text: str, until: Sequence[str]) -> str:
    """Truncates a text before the first occurrence of any string in `until`.

    Empty strings in `until` are ignored.
    """
    positions = [text.find(stop_text) for stop_text in until if stop_text and stop_text in text]
    return text[: min(positions)] if positions else text
