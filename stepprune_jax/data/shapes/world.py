"""Writes the world as a LLaVA data folder: conversations, question files, answers, pictures."""

import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from PIL import Image
from tqdm import tqdm

from stepprune_jax.data.shapes.draw import label_words, patch_labels, presence, render
from stepprune_jax.data.shapes.questions import Query, ask
from stepprune_jax.data.shapes.scene import Scene, draw_scene

MANIFEST = "world.json"
VERSION = 1
# Splits are numbered apart, so that no two of them share a scene's seed.
_SPLITS = {"train": 0, "validation": 1, "test": 2}


def scene_at(seed: int, split: str, number: int) -> tuple[Scene, list[Query]]:
    """One scene of the world and its questions, without writing anything.

    Args:
      seed: Seed of the split.
      split: "train", "validation" or "test".
      number: Number of the scene in the split.

    Returns:
      The scene and its questions; the same for the same arguments.
    """
    random = np.random.default_rng([seed, _SPLITS[split], number])
    scene = draw_scene(random)
    return scene, ask(scene, random)


def _name(split: str, number: int) -> str:
    return f"{split}_{number:06d}.png"


def _scenes(folder: Path, seed: int, split: str, count: int) -> Iterator[tuple[Scene, list[Query]]]:
    """Draws the pictures of a split, one after the other."""
    for number in tqdm(
        range(count), desc=f"drawing {split}", unit="scene", mininterval=5, disable=count < 500
    ):
        scene, queries = scene_at(seed, split, number)
        render(scene).save(folder / "images" / _name(split, number))
        yield scene, queries


def _write_lines(path: Path, rows: list[dict]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def _write_train(folder: Path, seed: int, count: int, patches: bool) -> None:
    """Conversations: all questions about a picture in one, as LLaVA merges its VQA data."""
    samples, labels = [], []
    for number, (scene, queries) in enumerate(_scenes(folder, seed, "train", count)):
        turns = []
        for query in queries:
            mark = "" if turns else "<image>\n"
            turns.append({"from": "human", "value": mark + query.text})
            turns.append({"from": "gpt", "value": query.answer})
        name = _name("train", number)
        samples.append({"id": f"train_{number:06d}", "image": name, "conversations": turns})
        if patches:
            labels.append(patch_labels(scene) | {"image_presence": presence(scene)})
    (folder / "train.json").write_text(json.dumps(samples, indent=0) + "\n", encoding="utf-8")
    if patches:
        arrays = {key: np.stack([label[key] for label in labels]) for key in labels[0]}
        np.savez_compressed(folder / "train_patches.npz", **arrays, **label_words())


def _write_questions(folder: Path, seed: int, split: str, count: int) -> None:
    """A question file, its answers, and the scenes behind them."""
    asked, answers, scenes = [], [], []
    for number, (scene, queries) in enumerate(_scenes(folder, seed, split, count)):
        for query in queries:
            name = f"{split}_{len(asked):06d}"
            image = _name(split, number)
            asked.append(
                {"question_id": name, "image": image, "text": query.text, "category": query.family}
            )
            answers.append({"question_id": name, "answer": query.answer})
            relevant = list(query.relevant)
            scenes.append(
                {"question_id": name, "complexity": scene.complexity, "relevant": relevant}
            )
    _write_lines(folder / f"{split}.jsonl", asked)
    _write_lines(folder / f"{split}_answers.jsonl", answers)
    _write_lines(folder / f"{split}_scenes.jsonl", scenes)


def write_world(
    folder: str | Path,
    *,
    seed: int,
    train: int,
    validation: int,
    test: int,
    test_seed: int | None = None,
    patches: bool = False,
) -> Path:
    """Writes a world; what is already there with the same settings is left as it is.

    Args:
      folder: Where; created if needed.
      seed: Seed of the training and validation scenes.
      train: Number of training scenes; 0 writes no such file. So for the others.
      validation: Number of validation scenes.
      test: Number of test scenes.
      test_seed: Seed of the test scenes; default `seed`.
      patches: Also write `train_patches.npz`, labels of every training patch for a tower's
        pretraining.

    Returns:
      The folder.

    Raises:
      ValueError: A negative number, or a folder that holds a world with other settings.
      FileExistsError: A folder that holds something else.
    """
    folder = Path(folder)
    settings = {
        "version": VERSION, "seed": seed, "train": train, "validation": validation, "test": test,
        "test_seed": seed if test_seed is None else test_seed, "patches": patches,
    }  # fmt: skip
    for name, value in settings.items():
        if value < 0:
            raise ValueError(f"{name} of the shapes world is {value}, expected a number >= 0")
    if _is_written(folder, settings):
        return folder
    (folder / "images").mkdir(parents=True, exist_ok=True)
    if train:
        _write_train(folder, seed, train, patches)
    if validation:
        _write_questions(folder, seed, "validation", validation)
    if test:
        _write_questions(folder, settings["test_seed"], "test", test)
    # Last, so that a folder without it is known to be incomplete.
    (folder / MANIFEST).write_text(json.dumps(settings, indent=1) + "\n", encoding="utf-8")
    return folder


def _is_written(folder: Path, settings: dict) -> bool:
    """Whether this very world is there; refuses another one, or a stranger's files."""
    manifest = folder / MANIFEST
    if not manifest.is_file():
        known = {"images", "train.json", "train_patches.npz"}
        known |= {f"{s}{e}.jsonl" for s in _SPLITS for e in ("", "_answers", "_scenes")}
        strange = sorted(p.name for p in folder.glob("*") if p.name not in known)
        if strange:
            raise FileExistsError(f"{folder} holds {strange[0]}, which is not a shapes world's")
        return False
    found = json.loads(manifest.read_text(encoding="utf-8"))
    differ = [f"{k} is {found.get(k)}, not {v}" for k, v in settings.items() if found.get(k) != v]
    if differ:
        raise ValueError(
            f"{folder} holds a shapes world with other settings ({'; '.join(differ)}); "
            "choose another folder or delete it"
        )
    return True


def preview(folder: str | Path, seed: int, count: int) -> Path:
    """Writes a contact sheet of the first scenes, to look at."""
    tiles = [
        render(scene_at(seed, "train", number)[0]).resize((192, 192)) for number in range(count)
    ]
    columns = min(count, 6)
    sheet = Image.new("RGB", (columns * 200, -(-count // columns) * 200), "white")
    for number, tile in enumerate(tiles):
        sheet.paste(tile, (number % columns * 200 + 4, number // columns * 200 + 4))
    path = Path(folder) / "preview.png"
    sheet.save(path)
    return path
