"""Answers the questions of other evaluation programs, as this package answers its benchmarks."""

import dataclasses
import io
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
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
from stepprune_jax.data.videos import Video
from stepprune_jax.extras import need
from stepprune_jax.inference import pipeline
from stepprune_jax.inference.base import RunOptions
from stepprune_jax.inference.dataset import Batching
from stepprune_jax.inference.encode import WIDTHS, chunk_size, encode_questions
from stepprune_jax.inference.generate import Generator, check_run
from stepprune_jax.inference.request import Request
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
        min_pixels: smallest area of an image; None for the checkpoint's.
        max_pixels: largest area of an image, and of a frame of a video; None for the checkpoint's.
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
    min_pixels: int | None = None
    max_pixels: int | None = None


class AskedQuestion(NamedTuple):
    """A question of another evaluation program.

    Attributes:
        text: the user's message. With several images or videos, `<image>` may mark the place of
            each of them. Without marks, they precede the text. A single one always precedes the
            text.
        images: the images and videos of the message.
        max_new_tokens: largest number of tokens of the answer.
        until: strings that end the answer. The answer does not include them.
    """

    text: str
    images: tuple[Image.Image | Video, ...]
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
    reading = {
        name: getattr(settings, name) for name in ("vision_folder", "min_pixels", "max_pixels")
    }
    source = folders.inspect_folder(settings.pretrained, **reading)
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
    model = load_vlm(settings.pretrained, mesh, jnp.dtype(dtype), **reading)
    batch_size *= row_count(mesh_of(model.params))
    return Answerer(Generator(model, pruner, _GREEDY, options), batch_size)


def answer_questions(
    answerer: Answerer,
    questions: Sequence[AskedQuestion],
    report: Callable[[int], object] = lambda num_answered: None,
) -> list[str]:
    """Answers questions greedily.

    Questions with the same length limit share batches. A question with several images is answered
    in a batch of one row. A video that several questions share is read and encoded once. If the
    number of a question's `<image>` marks differs from the number of its images, the marks are
    removed and the images precede the text. One warning counts these questions.

    A question whose video cannot be read has an empty answer, so that one damaged file does not end
    a long evaluation. One warning counts these questions.

    Args:
        answerer: model and method.
        questions: the questions.
        report: called after each chunk of questions with the number of answered questions.

    Returns:
        One answer per question, in the order of `questions`.

    Raises:
        FileNotFoundError: a question has a video whose file is missing. No question is answered.
        UserError: a length limit is below 1, an image cannot be read, the model or the method does
            not take videos, or no question about a video can be read.
    """
    length_limits = sorted({question.max_new_tokens for question in questions})
    for max_new_tokens in length_limits:
        expect("max_new_tokens", max_new_tokens, max_new_tokens >= 1, "an integer from 1")
    _check_videos(answerer.generator, questions)
    questions = _remove_unusable_marks(questions)
    max_chunk_length = chunk_size(answerer.generator.model, answerer.batch_size)
    answers, num_answered = [""] * len(questions), 0
    errors: list[UserError] = []  # of questions whose videos cannot be read

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
        batched_indices, indices_of_video = [], {}
        for index, question in enumerate(questions):
            if question.max_new_tokens != max_new_tokens:
                continue
            first_image = question.images[0] if question.images else None
            if len(question.images) > 1:
                store_answers([index], _answer_together(generator, [question], 1, errors))
            elif isinstance(first_image, Video):
                indices_of_video.setdefault(first_image.identity, []).append(index)
            else:
                batched_indices.append(index)
        for indices in _group_by_video([*indices_of_video.values()], answerer.batch_size):
            group = [questions[index] for index in indices]
            texts = _answer_together(generator, group, answerer.batch_size, errors)
            store_answers(indices, texts)
        for start in range(0, len(batched_indices), max_chunk_length):
            indices = batched_indices[start : start + max_chunk_length]
            chunk = {index: _convert_question(index, questions[index]) for index in indices}
            store_answers(indices, _answer_chunk(generator, chunk, answerer.batch_size))
    _report_unreadable(questions, errors)
    return answers


def _check_videos(generator: Generator, questions: Sequence[AskedQuestion]) -> None:
    """Checks that there are files of all videos, and that model and method take videos.

    Raises:
        FileNotFoundError: there is no file of a video.
        MissingPackageError: PyAV is not installed.
        UserError: the model or the method does not take videos.
    """
    videos = {
        image.identity: image
        for question in questions
        for image in question.images
        if isinstance(image, Video)
    }
    if not videos:
        return
    backbone = generator.model.backbone
    if not backbone.reads_videos:
        raise backbone.no_videos()
    if not generator.pruner.reads_videos:
        raise UserError(f"{generator.pruner.name} prunes images only, and no videos")
    if any(video.is_file for video in videos.values()):
        need("av", "questions about video files")
    for video in videos.values():
        if isinstance(video.source, str | Path) and not Path(video.source).is_file():
            raise FileNotFoundError(f"no video file at {video.name}")


def _report_unreadable(questions: Sequence[AskedQuestion], errors: Sequence[UserError]) -> None:
    """Warns of questions whose videos cannot be read.

    Args:
        questions: all questions.
        errors: the error of each question that has no answer.

    Raises:
        UserError: no question about a video has an answer, for example because each video has too
            many tokens. The error is the first of `errors`.
    """
    if not errors:
        return
    num_with_video = sum(
        any(isinstance(image, Video) for image in question.images) for question in questions
    )
    if len(errors) == num_with_video:
        raise errors[0]
    _logger.warning(
        "%d of %d questions about videos have an empty answer, because their videos cannot be "
        "read: %s, for example",
        len(errors),
        num_with_video,
        errors[0],
    )


def _group_by_video(
    indices_of_videos: Sequence[Sequence[int]], batch_size: int
) -> Iterator[list[int]]:
    """Groups questions into at least full batches, without dividing the questions of a video.

    Args:
        indices_of_videos: indices of the questions of each video.
        batch_size: questions per batch.

    Yields:
        Indices of questions whose videos are in memory at the same time.
    """
    group: list[int] = []
    for indices in indices_of_videos:
        group += indices
        if len(group) >= batch_size:
            yield group
            group = []
    if group:
        yield group


def _answer_together(
    generator: Generator,
    questions: Sequence[AskedQuestion],
    batch_size: int,
    errors: list[UserError],
) -> list[str]:
    """Answers questions whose images and videos are in memory at the same time.

    Args:
        generator: model, method, and length limit of the answers.
        questions: the questions, with equal numbers of images.
        batch_size: questions per batch over all devices.
        errors: gets the error of each question whose video cannot be read.

    Returns:
        One text per question; an empty text if the video of a question cannot be read.
    """
    has_videos = any(
        isinstance(image, Video) for question in questions for image in question.images
    )
    try:
        request = generator.read(
            [question.text for question in questions],
            [question.images for question in questions],
            as_shown=False,
        )
    except UserError as error:
        if not has_videos:
            raise
        if len(questions) > 1:
            return [
                text
                for question in questions
                for text in _answer_together(generator, [question], 1, errors)
            ]
        errors.append(error)
        return [""]
    if request.images is not None and len(questions) > len(request.images.grid):
        # The tower runs separately, once per distinct video.
        taps = generator.pruner.taps(generator.model.config)
        execution = generator.options.execution
        images = pipeline.encode(generator.model, request.images, taps, execution)
        request = request._replace(images=images)
    texts = []
    for start in range(0, len(questions), batch_size):
        rows = slice(start, start + batch_size)
        batch = Request(
            request.ids[rows], request.question_ids[rows], request.images, request.image_of[rows]
        )
        texts += [answer.text for answer in generator.answer(batch)]
    return texts


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
    """Converts a question with at most one image, and no video, to a benchmark question.

    The image becomes the bytes of a PNG file. Equal images have equal bytes, so the vision tower
    runs once for an image that several questions share.

    Args:
        index: index of the question, its id.
        question: the question.
    """
    image_bytes = None
    image = question.images[0] if question.images else None
    if isinstance(image, Image.Image):
        file = io.BytesIO()
        open_image(image).save(file, "PNG", compress_level=1)
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
