"""From prompts and images to ids and pixels, without the model's weights."""

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
from PIL import Image

from stepprune_jax.checkpoints.load import VLM
from stepprune_jax.data.images import open_image
from stepprune_jax.data.prompts import (
    IMAGE_MARK,
    check_ids,
    pad_batch,
    question_ids,
    tokenize_with_images,
)
from stepprune_jax.inference.base import Images, Prompts, read_images
from stepprune_jax.models.backbone import Backbone
from stepprune_jax.models.images import Pixels, join_images
from stepprune_jax.policy.buckets import row_bucket, words_bucket
from stepprune_jax.user_input import UserError, naming

ImageLike = str | Path | bytes | Image.Image
# A question, or a conversation: user first, then alternating.
Prompt = str | Sequence[str]


class Request(NamedTuple):
    """A batch of prompts, read and checked.

    Attributes:
        ids: ids of each prompt, with -200 in place of an image.
        question_ids: ids of the user's text in each prompt, for pruners that read text.
        images: the distinct images, before the tower; None if no prompt has an image.
        image_of: for each prompt, the row in `images` of each of its images.
    """

    ids: tuple[tuple[int, ...], ...]
    question_ids: tuple[tuple[int, ...], ...]
    images: Images | None
    image_of: tuple[tuple[int, ...], ...]

    def prompts(self) -> Prompts:
        """Returns the prompts as arrays, padded to buckets."""
        # Each pair of a width and a row length is a program, so words have few widths.
        longest = max(map(len, self.question_ids))
        words = pad_batch(self.question_ids, multiple=words_bucket(longest))
        b, j = len(self.ids), row_bucket(max(map(len, self.image_of)))
        image_of = np.full((b, j), -1, np.int32)
        for row, numbers in enumerate(self.image_of):
            image_of[row, : len(numbers)] = numbers
        return Prompts(*pad_batch(self.ids), *words, image_of, np.arange(b, dtype=np.int32))


def join_requests(requests: Sequence[Request]) -> Request:
    """Joins requests to one request; the tokens kept of each image stay the same."""
    ids, questions, image_of, images, first = [], [], [], [], 0
    for request in requests:
        ids += request.ids
        questions += request.question_ids
        image_of += [tuple(first + row for row in rows) for rows in request.image_of]
        if request.images is not None:
            images.append(request.images)
            first += len(request.images.grid)
    joined = None
    if images:
        pixels = join_images([part.pixels for part in images])
        joined = Images(
            grid=np.concatenate([part.grid for part in images]),
            sizes=np.concatenate([part.sizes for part in images]),
            seed=np.concatenate([part.seed for part in images]),
            pixels=pixels,
        )
    return Request(tuple(ids), tuple(questions), joined, tuple(image_of))


def read_request(
    model: VLM,
    prompts: Sequence[Prompt],
    images: Sequence[Sequence[ImageLike] | ImageLike | None] | None = None,
    *,
    system: str | None = None,
    as_shown: bool = True,
) -> Request:
    """Checks and prepares prompts and images.

    Args:
        model: the model; its weights are not read.
        prompts: for each prompt a question, or the turns of a conversation that ends with a
            question. `<image>` may mark the places of images; without marks, images come first.
        images: for each prompt its images: a list of paths, bytes of files or Pillow images, a
            single image without a list, or None. The same path, bytes or object is read and encoded
            once.
        system: replaces the system prompt of the model's template; None keeps the template's
            prompt.
        as_shown: whether images are turned by their EXIF orientation and get a white background;
            otherwise they are read as stored, see `data.images.open_image`.

    Returns:
        The request.

    Raises:
        FileNotFoundError: an image is missing.
        TypeError: a prompt is neither a string nor a list of strings, or an image has another type.
        ValueError: no prompts, an empty prompt, marks that do not match the images, a damaged
            image, an image that the model does not accept, or a model without a tokenizer. The
            message names the prompt or the image.
    """
    backbone = model.backbone
    rows = _check_arguments(model, prompts, images, system)
    image_rows: dict[str | bytes | int, int] = {}
    pixels: list[Pixels] = []
    ids, questions, image_of = [], [], []
    for number, (prompt, row) in enumerate(zip(prompts, rows, strict=True)):
        try:
            row = _as_images(row)
            turns = _turns(prompt, len(row), backbone)
            text = backbone.conversation(turns, system)
            ids.append(tuple(tokenize_with_images(model.tokenizer, text, len(row))))
            check_ids(ids[-1], backbone.config.text.vocab_size)
        except (TypeError, UserError) as error:
            prefix = f"prompt {number}: " if len(prompts) > 1 else ""
            raise type(error)(f"{prefix}{error}") from error
        questions.append(question_ids(model.tokenizer, turns))
        for place, image in enumerate(row):
            if _identity(image) in image_rows:
                continue
            image_rows[_identity(image)] = len(pixels)
            with naming(_name(image, place, number, turns[-1])):
                opened = open_image(image, as_shown=as_shown)
                pixels.append(backbone.preprocess(model.image_settings, [opened]))
        image_of.append(tuple(image_rows[_identity(image)] for image in row))
    read = read_images(backbone, pixels) if pixels else None
    return Request(tuple(ids), tuple(questions), read, tuple(image_of))


def _check_arguments(
    model: VLM,
    prompts: Sequence[Prompt],
    images: Sequence[Sequence[ImageLike] | ImageLike | None] | None,
    system: str | None,
) -> list[Sequence[ImageLike] | ImageLike | None]:
    """Checks the arguments of `read_request`; returns the images of each prompt."""
    if isinstance(prompts, str):
        raise TypeError("prompts is a string, expected a list of prompts")
    rows = [None] * len(prompts) if images is None else list(images)
    if model.tokenizer is None:
        raise UserError("the model has no tokenizer: load it with load_vlm")
    if model.image_settings is None and any(row is not None for row in rows):
        raise UserError("the model has no image settings: load it with load_vlm")
    if not len(prompts):
        raise UserError("prompts is empty, expected at least one")
    if len(rows) != len(prompts):
        raise UserError(f"images has {len(rows)} entries for {len(prompts)} prompt(s)")
    if IMAGE_MARK in (system or ""):
        raise UserError(f"{IMAGE_MARK} is not allowed in the system prompt, only in prompts")
    _check_utf8(system or "")
    return rows


def _identity(image: ImageLike) -> str | bytes | int:
    """Returns a key that distinguishes images: the path, the bytes, or the object's identity."""
    if isinstance(image, str | Path):
        return str(image)
    return image if isinstance(image, bytes) else id(image)


def _name(image: ImageLike, place: int, number: int, question: str) -> str:
    """Returns the name of an image in errors: its file, or its place in a prompt."""
    if isinstance(image, str | Path):
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
            raise TypeError(f"expected images as paths, bytes or Pillow images, got {kind}")
    return images


def _check_utf8(text: str) -> None:
    """Raises a UserError if a text cannot be encoded, such as one with half a surrogate pair."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        place = f"{text[error.start]!a} at character {error.start}"
        raise UserError(f"the prompt is not UTF-8 text: {place}") from error


def _turns(prompt: Prompt, num_images: int, backbone: Backbone) -> list[str]:
    """Returns the turns of a conversation, with image marks where the model expects them."""
    turns = list(prompt) if isinstance(prompt, list | tuple) else [prompt]
    if not turns or not all(isinstance(turn, str) for turn in turns):
        raise TypeError(f"expected a string or a list of strings, got {prompt!r}")
    if len(turns) % 2 == 0:
        raise UserError(f"a conversation of {len(turns)} turns ends with an answer, not a question")
    for turn in turns:
        _check_utf8(turn)
    # An answer cannot contain an image, but a model may have written the mark.
    turns[1::2] = [turn.replace(IMAGE_MARK, "") for turn in turns[1::2]]
    num_marks = sum(turn.count(IMAGE_MARK) for turn in turns)
    question = turns[-1].replace(IMAGE_MARK, "").strip()
    is_image_only = len(turns) == 1 and num_images > 0
    if not question and not is_image_only:
        raise UserError("the question is empty")
    if num_marks == turns[0].count(IMAGE_MARK):  # marks in later turns keep their places
        turns[0] = backbone.place_images(turns[0], num_images)
    return turns
