"""Writes the world as a LLaVA data folder: conversations, question files, answers, images."""

import json
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
from PIL import Image
from tqdm import tqdm

from experiments.datasets.llava_folder import Asked, write_conversations, write_questions
from experiments.shapes import crowds
from experiments.shapes.draw import label_words, patch_labels, presence, render
from experiments.shapes.levels import LEVELS, ask
from experiments.shapes.questions import Query
from experiments.shapes.scene import COLORS, SHAPES, Scene, draw_scene
from stepprune_jax.data.json_files import read_json_object, write_json_lines
from stepprune_jax.user_input import UserError

MANIFEST = "world.json"
# The manifest of a world that is being written, and so incomplete.
PARTIAL = "world.partial.json"
VERSION = 2
# Splits have separate numbers, so that no two of them share a scene's seed.
_SPLITS = {"train": 0, "validation": 1, "test": 2}


class _Drawing(NamedTuple):
    """Folder and resolution of a world."""

    folder: Path
    sizes: list[tuple[int, int]]  # side and grid of the images, in turn
    relative: bool  # whether labels tell places from the patch
    emphasis: float  # of training questions
    level: int

    def size(self, number: int) -> tuple[int, int]:
        """Side and grid of an image."""
        return self.sizes[number % len(self.sizes)]


def scene_at(
    seed: int,
    split: str,
    number: int,
    grid: int | None = None,
    emphasis: float = 1.0,
    level: int = 1,
) -> tuple[Scene, list[Query]]:
    """Returns one scene of the world and its questions, without writing anything."""
    random = np.random.default_rng([seed, _SPLITS[split], number])
    scene = draw_scene(random, LEVELS[level].crowd)
    grid = grid or LEVELS[level].grid
    return scene, ask(scene, random, grid=grid, emphasis=emphasis, level=level)


def _name(split: str, number: int) -> str:
    return f"{split}_{number:06d}.png"


def _asked(query: Query, split: str, number: int) -> Asked:
    return Asked(query.text, query.answer, query.family, _name(split, number))


def _scenes(to: _Drawing, seed: int, split: str, count: int) -> Iterator[tuple[Scene, list[Query]]]:
    """Draws the images of a split, one after the other."""
    for number in tqdm(
        range(count), desc=f"drawing {split}", unit="scene", mininterval=5, disable=count < 500
    ):
        emphasis, (side, grid) = to.emphasis if split == "train" else 1.0, to.size(number)
        scene, queries = scene_at(seed, split, number, grid, emphasis, to.level)
        render(scene, side).save(to.folder / "images" / _name(split, number))
        yield scene, queries


def _write_train(to: _Drawing, seed: int, count: int, patches: bool) -> None:
    """Writes conversations of all questions about an image, as LLaVA merges its VQA data."""
    exchanges, labels, queries_of_images = [], [], []
    for number, (scene, queries) in enumerate(_scenes(to, seed, "train", count)):
        exchanges += [_asked(query, "train", number) for query in queries]
        if patches:
            grid = to.size(number)[1]
            label = patch_labels(scene, grid, to.relative)
            if LEVELS[to.level].crowd:
                label["value_next"] = crowds.distances(scene, grid)
            labels.append(label | {"image_presence": presence(scene)})
            queries_of_images.append(queries)
    write_conversations(to.folder, exchanges)
    if patches:
        arrays = {key: _stack([label[key] for label in labels]) for key in labels[0]}
        crowd, words = LEVELS[to.level].crowd, label_words()
        if crowd:
            words["words_down"] = np.asarray(["up", "down"])  # as its questions say
        np.savez_compressed(to.folder / "train_patches.npz", **arrays, **words)
        np.savez_compressed(to.folder / "train_mentions.npz", **_mentions(queries_of_images, crowd))


def _stack(labels: list[np.ndarray]) -> np.ndarray:
    """Labels of all images; behind the patches of a smaller one stand 0 or NaN."""
    longest = max(map(len, labels))
    fill = 0 if labels[0].dtype.kind == "i" else np.nan
    stacked = np.full((len(labels), longest, *labels[0].shape[1:]), fill, labels[0].dtype)
    for row, label in zip(stacked, labels, strict=True):
        row[: len(label)] = label
    return stacked


def _mentions(queries_of_images: list[list[Query]], looks: bool) -> dict[str, np.ndarray]:
    """Returns one row per shape or group of shapes that a training question mentions."""
    rows = [
        (sample, exchange, *mention)
        for sample, queries in enumerate(queries_of_images)
        for exchange, query in enumerate(queries)
        for mention in query.mentions
    ]
    sample, exchange, word, number, place, look = zip(*rows, strict=True) if rows else [()] * 6
    names = (*SHAPES, *COLORS) if looks else ()
    unknown = (np.nan,) * (3 + len(names))
    value = [
        (*point, *(float(name in names_shown) for name in names)) if point else unknown
        for point, names_shown in zip(place, look, strict=True)
    ]
    return {
        "sample": np.asarray(sample, np.int32),
        "exchange": np.asarray(exchange, np.int32),
        "word": np.asarray(word, "U16"),
        "number": np.asarray(number, np.int32),
        "value": np.asarray(value, np.float32).reshape(-1, len(unknown)),
    }


def _write_questions(to: _Drawing, seed: int, split: str, count: int) -> None:
    """Writes a question file with its answers and scenes."""
    questions, scenes = [], []
    for number, (scene, queries) in enumerate(_scenes(to, seed, split, count)):
        for query in queries:
            name = f"{split}_{len(questions):06d}"
            questions.append(_asked(query, split, number))
            relevant = list(query.relevant)
            scenes.append(
                {"question_id": name, "complexity": scene.complexity, "relevant": relevant}
            )
    write_questions(to.folder, split, questions)
    write_json_lines(to.folder / f"{split}_scenes.jsonl", scenes)


def write_world(
    folder: str | Path,
    *,
    seed: int,
    train: int,
    validation: int,
    test: int,
    test_seed: int | None = None,
    patches: bool = False,
    side: int | None = None,
    grid: int | None = None,
    sizes: Sequence[int] | None = None,
    emphasis: float = 1.0,
    level: int = 1,
) -> Path:
    """Writes a world; an existing one with the same settings is left unchanged.

    The scenes and the questions do not depend on `side`, `grid` and `sizes`: a world of 336 pixels
    in 24 by 24 patches is that of 96 pixels in 12 by 12, at a higher resolution.

    Args:
        folder: folder to write; created if needed.
        seed: seed of the training and validation scenes.
        train: number of training scenes; 0 writes no such file, also for the others.
        validation: number of validation scenes.
        test: number of test scenes.
        test_seed: seed of the test scenes; default `seed`.
        patches: whether to write further labels for pretraining: `train_patches.npz`, labels of
            every training patch, and `train_mentions.npz`, number and place, on level 2 also the
            look, of the shapes that a question mentions.
        side: height and width of the images in pixels; None for the level's own, as for the next.
        grid: patches along an edge, for their labels and the relevant patches of answers.
        sizes: sides of the images in pixels, used in turn, instead of `side`; patches have
            `side / grid` pixels in all of them, and their labels give places relative to the patch.
        emphasis: factor on the frequency of families that are learned last, in training questions.
        level: 1, or 2 for crowds of look-alikes and questions of several steps. On level 2, the
            relevant patches of an answer follow its chain, and the labels of patches have
            `value_next`, `crowds.distances`.

    Returns:
        The folder.

    Raises:
        ValueError: an unknown level, a negative number, a grid that does not divide the side, a
            size that is not a multiple of the patch, or a folder that holds a world with other
            settings.
        FileExistsError: a folder that holds other files.
    """
    folder = Path(folder)
    _require("level", level, level in LEVELS, f"one of {', '.join(map(str, LEVELS))}")
    side = LEVELS[level].side if side is None else side
    grid = LEVELS[level].grid if grid is None else grid
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
        _require(name, value, 0 <= value < 1 << 64, "a number >= 0, below 2**64")
    is_valid = grid > 0 < side and side % grid == 0
    _require("side", side, is_valid, f"a positive multiple of grid ({grid})")
    if sizes is not None:
        patch = side // grid
        is_valid = bool(sizes) and all(size >= patch and size % patch == 0 for size in sizes)
        _require("sizes", list(sizes), is_valid, f"multiples of the {patch} pixels of a patch")
        settings["sizes"] = list(sizes)
    if level != 1:
        settings["level"] = level
    if _is_written(folder, settings):
        return folder
    (folder / "images").mkdir(parents=True, exist_ok=True)
    text = json.dumps(settings, indent=1) + "\n"
    sizes_and_grids = [(size, size * grid // side) for size in sizes or [side]]
    to = _Drawing(folder, sizes_and_grids, sizes is not None, emphasis, level)
    (folder / PARTIAL).write_text(text, encoding="utf-8")
    if train:
        _write_train(to, seed, train, patches)
    if validation:
        _write_questions(to, seed, "validation", validation)
    if test:
        _write_questions(to, settings["test_seed"], "test", test)
    os.replace(folder / PARTIAL, folder / MANIFEST)
    return folder


def _require(name: str, value: object, is_valid: bool, expected: str) -> None:
    """Raises a ValueError that names a setting, unless it `is_valid`."""
    if not is_valid:
        raise UserError(f"{name} of the shapes world is {value}, expected {expected}")


def _is_written(folder: Path, settings: dict[str, object]) -> bool:
    """Returns whether exactly this world is complete; raises for another one or other files."""
    manifest = next((folder / n for n in (MANIFEST, PARTIAL) if (folder / n).is_file()), None)
    if manifest is None:
        strange = sorted(path.name for path in folder.glob("*"))
        if strange:
            raise FileExistsError(
                f"{folder} holds {strange[0]}, and no {MANIFEST} that would make it a shapes "
                "world's; choose another folder"
            )
        return False
    written = read_json_object(manifest)
    differ = [
        f"{name} is {written.get(name)}, not {settings.get(name)}"
        for name in settings | written
        if written.get(name) != settings.get(name)
    ]
    if differ:
        raise UserError(
            f"{folder} holds a shapes world with other settings ({'; '.join(differ)}); "
            "choose another folder or delete it"
        )
    return manifest.name == MANIFEST


def preview(folder: str | Path, seed: int, count: int, level: int = 1) -> Path:
    """Writes a contact sheet of the first training scenes."""
    scenes = [scene_at(seed, "train", number, level=level)[0] for number in range(count)]
    tiles = [render(scene, 192) for scene in scenes]
    columns = min(count, 6)
    sheet = Image.new("RGB", (columns * 200, -(-count // columns) * 200), "white")
    for number, tile in enumerate(tiles):
        sheet.paste(tile, (number % columns * 200 + 4, number // columns * 200 + 4))
    path = Path(folder) / "preview.png"
    sheet.save(path)
    return path
