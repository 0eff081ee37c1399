"""From prompts and images to ids and pixels, without the model's weights."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from PIL import Image

from stepprune_jax.checkpoints.load import VLM
from stepprune_jax.data.images import open_image
from stepprune_jax.data.prompts import (
    IMAGE_MARK,
    check_ids,
    check_marks,
    pad_batch,
    question_ids,
    tokenize_with_images,
)
from stepprune_jax.data.videos import Video
from stepprune_jax.inference.base import Images, Prompts, join_media, read_media
from stepprune_jax.models.backbone import Backbone
from stepprune_jax.models.images import Clip, Pixels
from stepprune_jax.policy.buckets import row_bucket, words_bucket
from stepprune_jax.user_input import UserError, naming

# An image, or a video for models that read videos.
ImageLike = str | Path | bytes | Image.Image | Video
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
        # Each width of words needs another program for each row length, so there are few widths.
        longest_question = max(map(len, self.question_ids))
        words = pad_batch(self.question_ids, multiple=words_bucket(longest_question))
        b, j = len(self.ids), row_bucket(max(map(len, self.image_of)))
        image_of = np.full((b, j), -1, np.int32)
        for row, image_rows in enumerate(self.image_of):
            image_of[row, : len(image_rows)] = image_rows
        return Prompts(*pad_batch(self.ids), *words, image_of, np.arange(b, dtype=np.int32))


def join_requests(backbone: Backbone, requests: Sequence[Request]) -> Request:
    """Joins the prompts and images of several requests into one request.

    The tokens that a pruner keeps of each image do not change.

    Args:
        backbone: the model.
        requests: requests with images before the tower.

    Returns:
        A request with the prompts in the order of `requests`.
    """
    ids, question_ids, image_of = [], [], []
    images_of_requests, num_images = [], 0
    for request in requests:
        ids += request.ids
        question_ids += request.question_ids
        image_of += [tuple(num_images + row for row in rows) for rows in request.image_of]
        if request.images is not None:
            images_of_requests.append(request.images)
            num_images += len(request.images.grid)
    joined = join_media(backbone, images_of_requests) if images_of_requests else None
    return Request(tuple(ids), tuple(question_ids), joined, tuple(image_of))


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
            question. `<image>` may mark the places of images; without marks, the images precede the
            text.
        images: for each prompt its images and videos: a list of paths, bytes of files or Pillow
            images, and of `Video`s. One image needs no list, and None means no image. The same
            path, bytes or object is read and encoded once.
        system: replaces the system prompt of the model's template; None keeps the template's
            prompt.
        as_shown: whether images are turned by their EXIF orientation and get a white background;
            False reads images as stored, see `data.images.open_image`.

    Returns:
        The ids of the prompts, and the pixels of the distinct images.

    Raises:
        FileNotFoundError: an image is missing.
        TypeError: a prompt is neither a string nor a list of strings, or an image has another type.
        ValueError: no prompts, an empty prompt, marks that do not match the images, a damaged
            image, an image that the model does not accept, or a model without a tokenizer. The
            message names the prompt or the image.
    """
    backbone = model.backbone
    images_of_prompts = _check_arguments(model, prompts, images, system)
    image_row: dict[Any, int] = {}  # row in `pixels` by the image's identity
    pixels: list[Pixels] = []
    clips: list[Clip | None] = []  # the video of each row of `pixels`
    ids, questions, image_of = [], [], []
    for prompt_index, prompt in enumerate(prompts):
        try:
            prompt_images = _as_list(images_of_prompts[prompt_index])
            turns = _mark_images(prompt, len(prompt_images), backbone)
            text = backbone.conversation(turns, system)
            check_marks(text, len(prompt_images))
            # The times in the text of a video are known when it is read. All other text is checked
            # before that, because reading takes long.
            if not any(isinstance(image, Video) for image in prompt_images):
                ids.append(_tokenize(model, text))
        except (TypeError, UserError) as error:
            prefix = f"prompt {prompt_index}: " if len(prompts) > 1 else ""
            raise type(error)(f"{prefix}{error}") from error
        questions.append(question_ids(model.tokenizer, turns))
        for image_index, image in enumerate(prompt_images):
            if _identity(image) in image_row:
                continue
            image_row[_identity(image)] = len(pixels)
            with naming(_describe_image(image, image_index, prompt_index, turns[-1])):
                if isinstance(image, Video):
                    clip = backbone.read_video(model.image_settings, image)
                    pixels.append(clip.pixels)
                else:
                    clip, opened = None, open_image(image, as_shown=as_shown)
                    pixels.append(backbone.preprocess(model.image_settings, [opened]))
                clips.append(clip)
        image_of.append(tuple(image_row[_identity(image)] for image in prompt_images))
        if len(ids) < len(image_of):
            text = backbone.place_videos(text, [clips[row] for row in image_of[-1]])
            ids.append(_tokenize(model, text))
    distinct_images = read_media(backbone, pixels, clips) if pixels else None
    return Request(tuple(ids), tuple(questions), distinct_images, tuple(image_of))


def _check_arguments(
    model: VLM,
    prompts: Sequence[Prompt],
    images: Sequence[Sequence[ImageLike] | ImageLike | None] | None,
    system: str | None,
) -> list[Sequence[ImageLike] | ImageLike | None]:
    """Checks the arguments of `read_request`.

    Returns:
        The images of each prompt as the caller wrote them; None for a prompt without images.

    Raises:
        TypeError: `prompts` is a string.
        UserError: no prompts, a wrong number of images, an image mark in the system prompt, or a
            model without a tokenizer or image settings.
    """
    if isinstance(prompts, str):
        raise TypeError("prompts is a string, expected a list of prompts")
    images_of_prompts: list[Sequence[ImageLike] | ImageLike | None]
    images_of_prompts = [None] * len(prompts) if images is None else list(images)
    if model.tokenizer is None:
        raise UserError("the model has no tokenizer: load it with load_vlm")
    has_images = any(prompt_images is not None for prompt_images in images_of_prompts)
    if model.image_settings is None and has_images:
        raise UserError("the model has no image settings: load it with load_vlm")
    if not len(prompts):
        raise UserError("prompts is empty, expected at least one")
    if len(images_of_prompts) != len(prompts):
        num_entries = len(images_of_prompts)
        raise UserError(f"images has {num_entries} entries for {len(prompts)} prompt(s)")
    if IMAGE_MARK in (system or ""):
        raise UserError(f"{IMAGE_MARK} is not allowed in the system prompt, only in prompts")
    _check_utf8(system or "")
    return images_of_prompts


def _tokenize(model: VLM, text: str) -> tuple[int, ...]:
    """Returns the ids of the text of a prompt, and checks that the model has them."""
    ids = tuple(tokenize_with_images(model.tokenizer, text))
    check_ids(ids, model.config.text.vocab_size)
    return ids


def _identity(image: ImageLike) -> Any:
    """Returns a key that distinguishes images: the path, the bytes, or the object's identity."""
    if isinstance(image, Video):
        return image.identity
    if isinstance(image, str | Path):
        return str(image)
    return image if isinstance(image, bytes) else id(image)


def _describe_image(image: ImageLike, image_index: int, prompt_index: int, question: str) -> str:
    """Describes an image in error messages by its path, or by its index in a prompt."""
    if isinstance(image, str | Path):
        return str(image)
    if isinstance(image, Video) and isinstance(image.source, str | Path):
        return image.name
    kind = "video" if isinstance(image, Video) else "image"
    text = question.replace(IMAGE_MARK, "").strip()
    return f"{kind} {image_index} of prompt {prompt_index} ({text[:40]!r})"


def _as_list(images: Sequence[ImageLike] | ImageLike | None) -> list[ImageLike]:
    """Returns the images of one prompt as a list.

    Raises:
        TypeError: an image is neither a path, nor bytes, nor a Pillow image.
    """
    if images is None:
        return []
    image_list: list[Any] = list(images) if isinstance(images, list | tuple) else [images]
    for image in image_list:
        if not isinstance(image, ImageLike):
            type_name = type(image).__name__
            raise TypeError(
                f"expected images as paths, bytes, Pillow images or Videos, got {type_name}"
            )
    return image_list


def _check_utf8(text: str) -> None:
    """Raises a UserError if a text cannot be encoded as UTF-8, such as an unpaired surrogate."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        character = f"{text[error.start]!a} at character {error.start}"
        raise UserError(f"the prompt is not UTF-8 text: {character}") from error


def _mark_images(prompt: Prompt, num_images: int, backbone: Backbone) -> list[str]:
    """Checks a prompt, and marks the places of its images.

    Args:
        prompt: a question, or the turns of a conversation.
        num_images: number of images of the prompt.
        backbone: the model, which knows where images belong.

    Returns:
        The turns of the conversation, with an image mark for each image.

    Raises:
        TypeError: the prompt is neither a string nor a list of strings.
        UserError: the conversation ends with an answer, or the question is empty.
    """
    turns: list[Any] = list(prompt) if isinstance(prompt, list | tuple) else [prompt]
    if not turns or not all(isinstance(turn, str) for turn in turns):
        raise TypeError(f"expected a string or a list of strings, got {prompt!r}")
    if len(turns) % 2 == 0:
        raise UserError(f"a conversation of {len(turns)} turns ends with an answer, not a question")
    for turn in turns:
        _check_utf8(turn)
    # Answers contain no images, but an earlier answer of a model may contain the mark as text.
    turns[1::2] = [turn.replace(IMAGE_MARK, "") for turn in turns[1::2]]
    num_marks = sum(turn.count(IMAGE_MARK) for turn in turns)
    question = turns[-1].replace(IMAGE_MARK, "").strip()
    is_image_only = len(turns) == 1 and num_images > 0
    if not question and not is_image_only:
        raise UserError("the question is empty")
    if num_marks == turns[0].count(IMAGE_MARK):  # marks in later turns keep their places
        turns[0] = backbone.place_images(turns[0], num_images)
    return turns
