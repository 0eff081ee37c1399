"""Writes the world as a LLaVA data folder: conversations, question files, answers, images."""

import json
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
from tqdm import tqdm

from experiments.shapes.draw import label_words, patch_labels, presence, render
from experiments.shapes.llava_folder import AnsweredQuestion, write_conversations, write_questions
from experiments.shapes.questions import Query, random_queries
from experiments.shapes.scene import GRID, SIDE, Scene, random_scene
from stepprune_jax.data.json_files import read_json_object, write_json_lines
from stepprune_jax.user_input import UserError, expect

MANIFEST = "world.json"
# Manifest of an incomplete world.
PARTIAL = "world.partial.json"
VERSION = 2
# Part of a scene's seed, so that different splits never have the same scene.
_SPLITS = {"train": 0, "validation": 1, "test": 2}


class _Output(NamedTuple):
    """Folder and resolution of a world.

    Attributes:
        folder: the folder.
        sizes: side and grid of the images, used in turn.
        is_relative: whether labels of places are relative to the patch.
        emphasis: factor on the frequency of slowly learned families in training questions.
    """

    folder: Path
    sizes: list[tuple[int, int]]
    is_relative: bool
    emphasis: float

    def size(self, number: int) -> tuple[int, int]:
        """Returns side and grid of an image."""
        return self.sizes[number % len(self.sizes)]


def scene_at(
    seed: int, split: str, number: int, grid: int = GRID, emphasis: float = 1.0
) -> tuple[Scene, list[Query]]:
    """Returns a scene of the world and its questions.

    Args:
        seed: seed of the split.
        split: "train", "validation" or "test".
        number: number of the scene in its split.
        grid: patches along an edge, for the relevant patches.
        emphasis: factor on the frequency of slowly learned families.
    """
    rng = np.random.default_rng([seed, _SPLITS[split], number])
    scene = random_scene(rng)
    return scene, random_queries(scene, rng, grid=grid, emphasis=emphasis)


def _image_name(split: str, number: int) -> str:
    return f"{split}_{number:06d}.png"


def _answered(query: Query, split: str, number: int) -> AnsweredQuestion:
    image = _image_name(split, number)
    return AnsweredQuestion(query.text, query.answer, query.family, image)


def _write_images(
    output: _Output, seed: int, split: str, count: int
) -> Iterator[tuple[Scene, list[Query]]]:
    """Writes the images of a split, and yields the scene and the questions of each."""
    numbers = tqdm(
        range(count), desc=f"drawing {split}", unit="scene", mininterval=5, disable=count < 500
    )
    emphasis = output.emphasis if split == "train" else 1.0
    for number in numbers:
        side, grid = output.size(number)
        scene, queries = scene_at(seed, split, number, grid, emphasis)
        render(scene, side).save(output.folder / "images" / _image_name(split, number))
        yield scene, queries


def _write_train(output: _Output, seed: int, count: int, patches: bool) -> None:
    """Writes the training split: one conversation with all questions about each image."""
    questions, labels, queries_by_image = [], [], []
    for number, (scene, queries) in enumerate(_write_images(output, seed, "train", count)):
        questions += [_answered(query, "train", number) for query in queries]
        if patches:
            label = patch_labels(scene, output.size(number)[1], output.is_relative)
            labels.append(label | {"image_presence": presence(scene)})
            queries_by_image.append(queries)
    write_conversations(output.folder, questions)
    if patches:
        arrays = {name: _stack([label[name] for label in labels]) for name in labels[0]}
        np.savez_compressed(output.folder / "train_patches.npz", **arrays, **label_words())
        mentions = _tabulate_mentions(queries_by_image)
        np.savez_compressed(output.folder / "train_mentions.npz", **mentions)


def _stack(labels: list[np.ndarray]) -> np.ndarray:
    """Stacks the labels of all images. Smaller images are padded with 0 (classes) or NaN."""
    num_patches = max(map(len, labels))
    padding = 0 if labels[0].dtype.kind == "i" else np.nan
    stacked = np.full((len(labels), num_patches, *labels[0].shape[1:]), padding, labels[0].dtype)
    for row, label in zip(stacked, labels, strict=True):
        row[: len(label)] = label
    return stacked


def _tabulate_mentions(queries_by_image: list[list[Query]]) -> dict[str, np.ndarray]:
    """Returns the columns of a table with one row per mention in a training question."""
    rows = [
        (sample, exchange, *mention)
        for sample, queries in enumerate(queries_by_image)
        for exchange, query in enumerate(queries)
        for mention in query.mentions
    ]
    sample, exchange, word, number, place = zip(*rows, strict=True) if rows else [()] * 5
    value = [point or (np.nan,) * 3 for point in place]
    return {
        "sample": np.asarray(sample, np.int32),
        "exchange": np.asarray(exchange, np.int32),
        "word": np.asarray(word, "U16"),
        "number": np.asarray(number, np.int32),
        "value": np.asarray(value, np.float32).reshape(-1, 3),
    }


def _write_questions(output: _Output, seed: int, split: str, count: int) -> None:
    """Writes the questions of a split, their answers and their scenes."""
    questions, scenes = [], []
    for number, (scene, queries) in enumerate(_write_images(output, seed, split, count)):
        for query in queries:
            name = f"{split}_{len(questions):06d}"
            questions.append(_answered(query, split, number))
            relevant = list(query.relevant)
            scenes.append(
                {"question_id": name, "complexity": scene.complexity, "relevant": relevant}
            )
    write_questions(output.folder, split, questions)
    write_json_lines(output.folder / f"{split}_scenes.jsonl", scenes)


def write_world(
    folder: str | Path,
    *,
    seed: int,
    train: int,
    validation: int,
    test: int,
    test_seed: int | None = None,
    patches: bool = False,
    side: int = SIDE,
    grid: int = GRID,
    sizes: Sequence[int] | None = None,
    emphasis: float = 1.0,
) -> Path:
    """Writes a world. An existing world with the same settings is left unchanged.

    Scenes and questions do not depend on `side`, `grid` and `sizes`: a world of 336 pixels in 24 by
    24 patches shows the same scenes as a world of 96 pixels in 12 by 12 patches.

    Args:
        folder: folder to write; created if needed.
        seed: seed of the training and validation scenes.
        train: number of training scenes; 0 writes no training file.
        validation: number of validation scenes; 0 writes no validation files.
        test: number of test scenes; 0 writes no test files.
        test_seed: seed of the test scenes; None takes `seed`.
        patches: whether to write further labels for pretraining: `train_patches.npz` has labels of
            every training patch, and `train_mentions.npz` has number and place of the shapes that a
            question mentions.
        side: height and width of the images in pixels.
        grid: patches along an edge, for labels of patches and relevant patches of answers.
        sizes: sides of the images in pixels, used in turn instead of `side`. All patches have
            `side / grid` pixels, and labels of places are relative to the patch.
        emphasis: factor on the frequency of slowly learned families in training questions.

    Returns:
        The folder.

    Raises:
        UserError: a setting is invalid, or the folder has a world with other settings.
        FileExistsError: the folder has other files.
    """
    folder = Path(folder)
    settings = {
        "version": VERSION,
        "seed": seed,
        "train": train,
        "validation": validation,
        "test": test,
        "test_seed": seed if test_seed is None else test_seed,
        "patches": patches,
        "side": side,
        "grid": grid,
        "emphasis": emphasis,
    }
    for name, value in settings.items():
        expect(
            f"{name} of the shapes world", value, 0 <= value < 1 << 64, "a number >= 0, below 2**64"
        )
    is_valid = grid > 0 < side and side % grid == 0
    expect("side of the shapes world", side, is_valid, f"a positive multiple of grid ({grid})")
    if sizes is not None:
        patch = side // grid
        is_valid = bool(sizes) and all(size >= patch and size % patch == 0 for size in sizes)
        expected = f"multiples of the {patch} pixels of a patch"
        expect("sizes of the shapes world", list(sizes), is_valid, expected)
        settings["sizes"] = list(sizes)
    if is_complete(folder, settings):
        return folder
    (folder / "images").mkdir(parents=True, exist_ok=True)
    (folder / PARTIAL).write_text(json.dumps(settings, indent=1) + "\n", encoding="utf-8")
    sizes_and_grids = [(size, size * grid // side) for size in sizes or [side]]
    output = _Output(folder, sizes_and_grids, sizes is not None, emphasis)
    if train:
        _write_train(output, seed, train, patches)
    if validation:
        _write_questions(output, seed, "validation", validation)
    if test:
        _write_questions(output, settings["test_seed"], "test", test)
    os.replace(folder / PARTIAL, folder / MANIFEST)
    return folder


def is_complete(folder: Path, settings: dict[str, object]) -> bool:
    """Returns whether a folder has this complete world.

    Raises:
        UserError: the folder has a world with other settings.
        FileExistsError: the folder has other files.
    """
    manifests = (folder / name for name in (MANIFEST, PARTIAL))
    manifest = next((path for path in manifests if path.is_file()), None)
    if manifest is None:
        other_files = sorted(path.name for path in folder.glob("*"))
        if other_files:
            raise FileExistsError(
                f"{folder} has {other_files[0]} but no {MANIFEST}, so it is no world: choose "
                "another folder"
            )
        return False
    written = read_json_object(manifest)
    changes = [
        f"{name} is {written.get(name)}, not {settings.get(name)}"
        for name in settings | written
        if written.get(name) != settings.get(name)
    ]
    if changes:
        raise UserError(
            f"{folder} has a world with other settings ({'; '.join(changes)}); choose another "
            "folder or delete it"
        )
    return manifest.name == MANIFEST
