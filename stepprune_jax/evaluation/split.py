"""The questions of a split, and what the frozen model makes of them once and for all."""

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import Mesh
from jaxtyping import Array, Int

from stepprune_jax.baselines import cls_order, cls_tap
from stepprune_jax.checkpoints.load import VLM
from stepprune_jax.config import LlavaConfig
from stepprune_jax.data.llava import (
    Question,
    Scene,
    read_answers,
    read_questions,
    read_scenes,
)
from stepprune_jax.data.prompts import pad_batch
from stepprune_jax.generate.placement import constrain_rows, jit_for_weights, mesh_of, place_rows
from stepprune_jax.generate.request import read_request
from stepprune_jax.models import vlm
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
        image_of: [q] row of the features.
        features: [i, n, d] of the distinct pictures, in the model's dtype.
        by_attention: [i, n] patches by the class token's attention, most attended first; None
            unless asked for.
    """

    ids: Int[np.ndarray, "q l"]
    length: Int[np.ndarray, "q"]
    words: Int[np.ndarray, "q w"]
    num_words: Int[np.ndarray, "q"]
    image_of: Int[np.ndarray, "q"]
    features: np.ndarray
    by_attention: Int[np.ndarray, "i n"] | None


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
    questions: Sequence[Question],
    *,
    batch_size: int,
    with_attention: bool = False,
    attention: str = "matmul",
    report: Callable[[int], None] = lambda done: None,
) -> Encoded:
    """Runs the tower once per distinct picture and tokenises every question.

    Args:
        model: the model.
        questions: what is asked.
        batch_size: pictures that go through the tower together.
        with_attention: also rank patches by the class token's attention.
        attention: "matmul", "xla" or "cudnn", for the tower.
        report: called with the number of pictures done at each batch.

    Returns:
        The encoded split, questions in the given order.

    Raises:
        ValueError: a picture that cannot be read, or one of another size than the model takes.
    """
    numbers: dict[Path, int] = {}
    asked: list[list[int]] = []  # of each picture
    for row, question in enumerate(questions):
        number = numbers.setdefault(question.image, len(numbers))
        if number == len(asked):
            asked.append([])
        asked[number].append(row)
    mesh, tap = mesh_of(model.params), cls_tap(model.config) if with_attention else None
    ids: list[Any] = [None] * len(questions)
    words: list[Any] = [None] * len(questions)
    features, ranked = [], []
    for first, rows in _in_batches(asked, batch_size):
        with user_input():
            request = read_request(
                model.tokenizer, model.image_settings, model.config,
                [questions[row].text for row in rows], [questions[row].image for row in rows],
            )  # fmt: skip
        for row, prompt, said in zip(rows, request.ids, request.question_ids, strict=True):
            ids[row], words[row] = prompt, said
        count = len(request.pixels)
        pixels = request.pixels[np.arange(batch_size) % count]
        found, order = encode_pictures(
            model.params, model.config, place_rows(mesh, pixels),
            tap=tap, attention=attention, mesh=mesh,
        )  # fmt: skip
        features.append(np.asarray(found)[:count])
        ranked.append(None if tap is None else np.asarray(order)[:count])
        report(first + count)
    prompts, said = (pad_batch(rows, multiple=_MULTIPLE) for rows in (ids, words))
    image_of = np.array([numbers[question.image] for question in questions], np.int32)
    return Encoded(
        prompts.ids, prompts.length, said.ids, said.length, image_of, np.concatenate(features),
        None if tap is None else np.concatenate(ranked),
    )  # fmt: skip


def _in_batches(asked: list[list[int]], size: int) -> Iterator[tuple[int, list[int]]]:
    """Batches of so many pictures: the first one's number, and the questions about them."""
    for first in range(0, len(asked), size):
        yield first, [row for rows in asked[first : first + size] for row in rows]


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
