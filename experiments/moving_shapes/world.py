"""Writes the world as a data folder: clips, conversations, question files and answers."""

import json
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
from jaxtyping import UInt8
from PIL import Image
from tqdm import tqdm

from experiments.moving_shapes.draw import random_clip
from experiments.moving_shapes.scene import (
    FRAME_RATE,
    NUM_FRAMES,
    SIDE,
    SPLITS,
    Query,
    Scene,
    choose_queries,
)
from experiments.shapes.world import MANIFEST, PARTIAL, is_complete
from stepprune_jax.data.json_files import write_json, write_json_lines
from stepprune_jax.extras import need
from stepprune_jax.user_input import expect

VERSION = 1
# Folder of the clips; data folders have images and videos in one folder.
CLIPS = "images"
FORMATS = ("mp4", "npz", "png")


class Clip(NamedTuple):
    """A clip of a split with its questions.

    Attributes:
        scene: the scene.
        frames: [frames, side, side, 3] the drawn frames.
        queries: the questions.
    """

    scene: Scene
    frames: UInt8[np.ndarray, "frames side side 3"]
    queries: list[Query]


def clip_at(seed: int, split: str, number: int) -> Clip:
    """Returns a clip of the world; every split and seed has its own clips."""
    rng = np.random.default_rng([seed, SPLITS[split], number])
    scene, frames, _ = random_clip(rng)
    return Clip(scene, frames, choose_queries(scene, rng))


def write_clip(path: Path, frames: UInt8[np.ndarray, "frames side side 3"]) -> None:
    """Writes frames without loss, by the suffix of the path.

    Args:
        path: an MP4 file, an npz file with the array "frames", or a folder of PNG files for the
            suffix ".png".
        frames: the frames.
    """
    partial = path.with_name(f"partial.{path.name}")
    if path.suffix == ".png":
        partial.mkdir(exist_ok=True)
        for number, frame in enumerate(frames):
            Image.fromarray(frame).save(partial / f"{number:02d}.png")
    elif path.suffix == ".npz":
        with partial.open("wb") as file:
            np.savez_compressed(file, frames=frames)
    else:
        _write_mp4(partial, frames)
    os.replace(partial, path)


def _write_mp4(path: Path, frames: UInt8[np.ndarray, "frames side side 3"]) -> None:
    import av

    with av.open(str(path), "w", format="mp4") as container:
        stream = container.add_stream("libx264rgb", rate=round(FRAME_RATE))
        stream.height, stream.width = frames.shape[1:3]
        stream.pix_fmt = "rgb24"
        stream.options = {"crf": "0", "preset": "ultrafast"}  # lossless
        for picture in frames:
            container.mux(stream.encode(av.VideoFrame.from_ndarray(picture, format="rgb24")))
        container.mux(stream.encode())


def _write_clips(
    folder: Path, seed: int, split: str, count: int, suffix: str
) -> Iterator[tuple[str, Query]]:
    """Writes the missing clips of a split, and yields the name of the clip with each question."""
    numbers = tqdm(range(count), f"drawing {split}", mininterval=5, disable=count < 200)
    for number in numbers:
        clip = clip_at(seed, split, number)
        name = f"{split}_{number:06d}.{suffix}"
        if not (folder / CLIPS / name).exists():
            write_clip(folder / CLIPS / name, clip.frames)
        for query in clip.queries:
            yield name, query


def _write_train(folder: Path, answered: Sequence[tuple[str, Query]]) -> None:
    """Writes `train.json`, one conversation for each clip, in LLaVA-Video's format."""
    conversations: dict[str, list[dict[str, str]]] = {}
    for name, query in answered:
        turns = conversations.setdefault(name, [])
        text = query.text if turns else f"<video>\n{query.text}"
        turns.append({"from": "human", "value": text})
        turns.append({"from": "gpt", "value": query.answer})
    samples = [
        {"id": Path(name).stem, "video": name, "conversations": turns}
        for name, turns in conversations.items()
    ]
    path = folder / "train.json"
    path.write_text(json.dumps(samples, indent=0) + "\n", encoding="utf-8")


def _write_questions(folder: Path, split: str, answered: Sequence[tuple[str, Query]]) -> None:
    """Writes the questions of a split, their answers, and the frames that hold the answers."""
    questions, answers, scenes = [], [], []
    for number, (name, query) in enumerate(answered):
        question_id = f"{split}_{number:06d}"
        questions.append(
            {
                "question_id": question_id,
                "video": name,
                "text": query.text,
                "category": query.family,
                "frames": list(query.frames),
            }
        )
        answers.append({"question_id": question_id, "answer": query.answer})
        # Statistics of the learned stop read "relevant": here frames in place of patches.
        scenes.append(
            {
                "question_id": question_id,
                "complexity": len(query.evidence),
                "relevant": list(query.frames),
            }
        )
    write_json_lines(folder / f"{split}.jsonl", questions)
    write_json_lines(folder / f"{split}_answers.jsonl", answers)
    write_json_lines(folder / f"{split}_scenes.jsonl", scenes)


def write_world(
    folder: str | Path,
    *,
    seed: int = 0,
    train: int = 3000,
    validation: int = 100,
    test: int = 520,
    file_format: str = "mp4",
) -> Path:
    """Writes a world. An interrupted call continues with the first clip that is missing.

    Args:
        folder: folder to write; created if needed.
        seed: seed of the clips.
        train: number of training clips; 0 writes no training file.
        validation: number of validation clips.
        test: number of test clips.
        file_format: one of `FORMATS`. The library reads MP4 files; "npz" and "png" (a folder of
            PNG files for each clip) are for other programs.

    Returns:
        The folder.

    Raises:
        UserError: a setting is invalid, or the folder has a world with other settings or other
            files.
    """
    folder, counts = Path(folder), {"train": train, "validation": validation, "test": test}
    for name, value in {"seed": seed, **counts}.items():
        is_valid = 0 <= value < 1 << 64
        expect(f"{name} of the moving shapes", value, is_valid, "a number >= 0, below 2**64")
    expect("format", file_format, file_format in FORMATS, f"one of {', '.join(FORMATS)}")
    if file_format == "mp4":
        need("av", "clips are written as MP4 files")
    settings = {
        "version": VERSION,
        "seed": seed,
        **counts,
        "format": file_format,
        "frames": NUM_FRAMES,
        "side": SIDE,
    }
    if is_complete(folder, settings):
        return folder
    (folder / CLIPS).mkdir(parents=True, exist_ok=True)
    write_json(folder / PARTIAL, settings)
    for split, count in counts.items():
        if count:
            answered = list(_write_clips(folder, seed, split, count, file_format))
            if split == "train":
                _write_train(folder, answered)
            else:
                _write_questions(folder, split, answered)
    os.replace(folder / PARTIAL, folder / MANIFEST)
    return folder
