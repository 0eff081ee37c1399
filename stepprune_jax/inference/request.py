"""From prompts and images to ids and pixels, without the model's weights."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from PIL import Image

from stepprune_jax.data.images import open_image
from stepprune_jax.data.prompts import IMAGE_MARK, check_ids, question_ids, tokenize_with_images
from stepprune_jax.models.family import ModelConfig
from stepprune_jax.models.images import join_images, naming

ImageLike = str | Path | Image.Image
# A question, or a conversation: user first, then alternating.
Prompt = str | Sequence[str]


class Request(NamedTuple):
    """A batch of prompts, read and checked.

    Attributes:
        ids: ids of each prompt, with -200 in place of an image.
        question_ids: ids of each prompt's user text alone, for the policy.
        pixels: the distinct images after the family's preprocessing, or None.
        image_of: for each prompt, the row in `pixels` of each of its images.
    """

    ids: tuple[tuple[int, ...], ...]
    question_ids: tuple[tuple[int, ...], ...]
    pixels: Any
    image_of: tuple[tuple[int, ...], ...]


def read_request(
    tokenizer: Any,
    image_settings: Any,
    config: ModelConfig,
    prompts: Sequence[Prompt],
    images: Sequence[Sequence[ImageLike] | ImageLike | None] | None = None,
) -> Request:
    """Checks and prepares prompts and images, without touching the model's weights.

    Args:
        tokenizer: the model's `transformers` tokenizer.
        image_settings: the model's image settings; None only if there are no images.
        config: the model's configuration.
        prompts: a question each, or the turns of a conversation that ends with one. `<image>` may
            mark the places of images; without it they come first.
        images: for each prompt its images: paths or Pillow images; one alone needs no list. The
            same path or object is read and encoded once.

    Returns:
        The request.

    Raises:
        FileNotFoundError: an image is missing.
        TypeError: a prompt is neither a string nor strings, or an image neither a path nor a Pillow
            image.
        ValueError: no prompts, an empty prompt, marks that do not match the images, a damaged
            image, or one that the model does not take. The message names the prompt or the image.
    """
    if isinstance(prompts, str):
        raise TypeError("prompts is a string, expected a list of prompts")
    if not len(prompts):
        raise ValueError("prompts is empty, expected at least one")
    rows = [None] * len(prompts) if images is None else list(images)
    if len(rows) != len(prompts):
        raise ValueError(f"images has {len(rows)} entries for {len(prompts)} prompt(s)")
    numbers: dict[str | int, int] = {}
    pixels: list[Any] = []
    ids, questions, image_of = [], [], []
    for number, (prompt, row) in enumerate(zip(prompts, rows, strict=True)):
        try:
            row = _as_images(row)
            turns = _turns(prompt, len(row), config)
            text = config.family.conversation(turns)
            ids.append(tuple(tokenize_with_images(tokenizer, text, len(row))))
            check_ids(ids[-1], config.text.vocab_size)
        except (TypeError, ValueError) as error:
            where = f"prompt {number}: " if len(prompts) > 1 else ""
            raise type(error)(f"{where}{error}") from error
        questions.append(question_ids(tokenizer, turns))
        for place, image in enumerate(row):
            if _identity(image) in numbers:
                continue
            if image_settings is None:
                raise ValueError("images are given, but the model has no image settings")
            numbers[_identity(image)] = len(pixels)
            with naming(_name(image, place, number, turns[-1])):
                opened = open_image(image)
                pixels.append(config.family.preprocess(config, image_settings, [opened]))
        image_of.append(tuple(numbers[_identity(image)] for image in row))
    joined = join_images(pixels) if pixels else None
    return Request(tuple(ids), tuple(questions), joined, tuple(image_of))


def _identity(image: ImageLike) -> str | int:
    """Returns a key that distinguishes images: the path, or the object's identity."""
    return id(image) if isinstance(image, Image.Image) else str(image)


def _name(image: ImageLike, place: int, number: int, question: str) -> str:
    """Returns how an error names an image: its file, or where it was given."""
    if not isinstance(image, Image.Image):
        return str(image)
    words = question.replace(IMAGE_MARK, "").strip()
    return f"image {place} of prompt {number} ({words[:40]!r})"


def _as_images(row: Sequence[ImageLike] | ImageLike | None) -> list[ImageLike]:
    """Returns the images of one prompt as a list."""
    if row is None:
        return []
    images = list(row) if isinstance(row, list | tuple) else [row]
    for image in images:
        if not isinstance(image, ImageLike):
            kind = type(image).__name__
            raise TypeError(f"expected images as paths or Pillow images, got {kind}")
    return images


def _turns(prompt: Prompt, num_images: int, config: ModelConfig) -> list[str]:
    """Returns the turns of a conversation, with image marks where the model expects them."""
    turns = list(prompt) if isinstance(prompt, list | tuple) else [prompt]
    if not turns or not all(isinstance(turn, str) for turn in turns):
        raise TypeError(f"expected a string or a list of strings, got {prompt!r}")
    if len(turns) % 2 == 0:
        raise ValueError(
            f"a conversation of {len(turns)} turns ends with an answer, not a question"
        )
    for turn in turns:
        try:
            turn.encode()
        except UnicodeEncodeError as error:
            place = f"{turn[error.start]!a} at character {error.start}"
            raise ValueError(f"the prompt is not UTF-8 text: {place}") from error
    # An answer cannot contain an image, but a model may have written the mark.
    turns[1::2] = [turn.replace(IMAGE_MARK, "") for turn in turns[1::2]]
    marks = sum(turn.count(IMAGE_MARK) for turn in turns)
    if marks not in (0, num_images):
        raise ValueError(
            f"the prompt has {marks} {IMAGE_MARK}, but {num_images} image(s) are given"
        )
    if not turns[-1].replace(IMAGE_MARK, "").strip() and not (len(turns) == 1 and num_images):
        raise ValueError("the question is empty")
    if marks == turns[0].count(IMAGE_MARK):  # otherwise marks in later turns keep their places
        turns[0] = config.family.place_images(turns[0], num_images)
    return turns
