"""The questions of a split, and what the frozen model makes of them once and for all."""

import io
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import Mesh
from jaxtyping import Array, Bool, Int
from PIL import Image

from stepprune_jax.benchmarks.questions import BenchmarkQuestion
from stepprune_jax.checkpoints.load import VLM
from stepprune_jax.data.images import open_image
from stepprune_jax.data.llava import (
    Question,
    Scene,
    read_answers,
    read_questions,
    read_scenes,
)
from stepprune_jax.data.prompts import pad_batch
from stepprune_jax.evaluation.timing import timed
from stepprune_jax.inference.request import Request, read_request
from stepprune_jax.models import vlm
from stepprune_jax.models.llava.config import LlavaConfig
from stepprune_jax.parallel.placement import (
    constrain_rows,
    fetch,
    jit_for_weights,
    mesh_of,
    place_rows,
)
from stepprune_jax.pruning import cls_order, cls_tap
from stepprune_jax.user_input import user_input

# Widths of padded ids are multiples of this.
_MULTIPLE = 8


class Split(NamedTuple):
    """Questions about pictures with their answers.

    Attributes:
        questions: in the file's order.
        answers: one per question.
        scenes: one per question, or None where nothing is known of the pictures.
    """

    questions: list[Question]
    answers: list[str]
    scenes: list[Scene] | None


class Encoded(NamedTuple):
    """A split as the programs take it; arrays lie on the host.

    Attributes:
        ids: [q, l] prompt ids with -200 at the image, right-padded.
        length: [q] of these.
        words: [q, w] ids of the user's words, for the policy.
        num_words: [q] of these.
        image_of: [q] row of the features; 0 for a question without a picture.
        features: [i, n, d] of the distinct pictures, in the model's dtype; zeros for one picture
            where there is none.
        by_attention: [i, n] patches by the class token's attention, most attended first; None
            unless asked for.
        seconds: of a question with a picture, on average, for picture and ids.
    """

    ids: Int[np.ndarray, "q l"]
    length: Int[np.ndarray, "q"]
    words: Int[np.ndarray, "q w"]
    num_words: Int[np.ndarray, "q"]
    image_of: Int[np.ndarray, "q"]
    features: np.ndarray
    by_attention: Int[np.ndarray, "i n"] | None
    seconds: float = 0.0

    @property
    def has_image(self) -> Bool[np.ndarray, "q"]:
        """Which questions show a picture."""
        return (self.ids == vlm.IMAGE_TOKEN).any(axis=1)

    def take(self, rows: Int[np.ndarray, "r"]) -> "Encoded":
        """Some of the questions, with all pictures."""
        of_rows = ("ids", "length", "words", "num_words", "image_of")
        return self._replace(**{name: getattr(self, name)[rows] for name in of_rows})


def read_split(folder: str | Path, name: str) -> Split:
    """Reads a split of a data folder: questions, answers and, where there are such, scenes.

    Args:
        folder: with images/ and the files of the split.
        name: "validation" or "test".

    Returns:
        The split.

    Raises:
        FileNotFoundError: a file or a picture is missing.
        ValueError: a file is not what it should be; the message names file, line and field.
    """
    folder = Path(folder)
    questions = read_questions(folder / f"{name}.jsonl", folder / "images")
    if not questions:
        raise ValueError(f"{folder / name}.jsonl holds no questions")
    answers = read_answers(folder / f"{name}_answers.jsonl", questions)
    scenes = folder / f"{name}_scenes.jsonl"
    return Split(questions, answers, read_scenes(scenes, questions) if scenes.is_file() else None)


def thin(split: Split, most: int) -> Split:
    """At most so many questions of a split, spread evenly over it; 0 keeps all."""
    total = len(split.questions)
    if not 0 < most < total:
        return split
    chosen = [number * total // most for number in range(most)]
    return Split(*([part[at] for at in chosen] if part is not None else None for part in split))


def encode_split(
    model: VLM,
    questions: Sequence[Question | BenchmarkQuestion],
    *,
    batch_size: int,
    with_attention: bool = False,
    attention: str = "matmul",
    sizes: Sequence[int] = (),
    report: Callable[[int], None] = lambda done: None,
) -> Encoded:
    """Runs the tower once per distinct picture and tokenises every question.

    Args:
        model: the model.
        questions: what is asked.
        batch_size: pictures that go through the tower together.
        with_attention: also rank patches by the class token's attention.
        attention: "matmul", "xla" or "cudnn", for the tower.
        sizes: widths that prompts and words are padded to, so that many splits share programs;
            without any, what the longest needs.
        report: called with the number of pictures done at each batch.

    Returns:
        The encoded split, questions in the given order.

    Raises:
        ValueError: a picture that cannot be read, or one of another size than the model takes.
    """
    asked: dict[Path | bytes | None, list[int]] = {}
    for row, question in enumerate(questions):
        asked.setdefault(question.image, []).append(row)
    without = asked.pop(None, [])
    numbers = {image: number for number, image in enumerate(asked)}
    mesh, tap = mesh_of(model.params), cls_tap(model.config) if with_attention else None
    ids: list[Any] = [None] * len(questions)
    words: list[Any] = [None] * len(questions)
    features, ranked, seconds = [], [], 0.0
    for first in range(0, len(numbers), batch_size):
        rows = [row for image in list(asked)[first : first + batch_size] for row in asked[image]]

        def run(rows=rows):
            request = _request(model, [questions[row] for row in rows])
            count = len(request.pixels)
            pixels = place_rows(mesh, request.pixels[np.arange(batch_size) % count])
            found = encode_pictures(
                model.params, model.config, pixels, tap=tap, attention=attention, mesh=mesh
            )
            return request, *(None if x is None else x[:count] for x in fetch(found))

        (request, found, order), taken = timed(run, encode_pictures.num_compiled)
        _fill(ids, words, rows, request)
        features.append(found)
        ranked.append(order)
        seconds += taken
        report(first + len(found))
    if without:
        _fill(ids, words, without, _request(model, [questions[row] for row in without]))
    if not features:
        shape = (1, model.config.num_image_tokens, model.config.vision.hidden_size)
        features = [np.zeros(shape, jax.tree.leaves(model.params)[0].dtype)]
        ranked = [np.tile(np.arange(shape[1], dtype=np.int32), (1, 1))]
    prompts, said = (pad_batch(rows, multiple=_multiple(rows, sizes)) for rows in (ids, words))
    image_of = np.array([numbers.get(question.image, 0) for question in questions], np.int32)
    shown = max(1, len(questions) - len(without))
    return Encoded(
        prompts.ids, prompts.length, said.ids, said.length, image_of, np.concatenate(features),
        None if tap is None else np.concatenate(ranked), seconds / shown,
    )  # fmt: skip


@user_input()
def _request(model: VLM, questions: Sequence[Question | BenchmarkQuestion]) -> Request:
    """Ids and pixels; a picture that is shown twice comes once."""
    opened: dict[bytes, Image.Image] = {}
    pictures: list[Any] = [question.image for question in questions]
    for number, picture in enumerate(pictures):
        if isinstance(picture, bytes):
            if picture not in opened:
                opened[picture] = _open(picture, questions[number].text)
            pictures[number] = opened[picture]
    texts = [question.text for question in questions]
    return read_request(model.tokenizer, model.image_settings, model.config, texts, pictures)


def _open(data: bytes, text: str) -> Image.Image:
    """A picture that came with its question."""
    try:
        return open_image(Image.open(io.BytesIO(data)))
    except (OSError, ValueError) as error:
        raise ValueError(f"the picture of the question {text[:60]!r}: {error}") from error


def _fill(ids: list[Any], words: list[Any], rows: Sequence[int], request: Request) -> None:
    """Puts the ids of a batch in their places."""
    for row, prompt, said in zip(rows, request.ids, request.question_ids, strict=True):
        ids[row], words[row] = prompt, said


def _multiple(rows: Sequence[Sequence[int]], sizes: Sequence[int]) -> int:
    """What widths are to be a multiple of: one of the sizes, if the longest row fits it."""
    longest = max(map(len, rows))
    return next((size for size in sizes if size >= longest), _MULTIPLE)


def _encode(
    params: Any,
    config: LlavaConfig,
    pixels: Array,
    tap: vlm.Tap | None,
    attention: str,
    mesh: Mesh | None,
) -> tuple[Array, Array | None]:
    """Features [i, n, d], and patches by the class token's attention if a tap is given."""
    taps = () if tap is None else (tap,)
    features, found = vlm.encode_image(params, config, pixels, taps, attention)
    order = None
    if tap is not None:
        order = cls_order(next(iter(found.values())))
        if config.feature_select == "full":  # token 0 is the class token, and always the first
            first = jax.numpy.zeros_like(order[:, :1])
            order = jax.numpy.concatenate([first, order + 1], axis=1)
    return constrain_rows(mesh, (features, order))


encode_pictures = jit_for_weights(_encode, ("config", "tap", "attention", "mesh"))
