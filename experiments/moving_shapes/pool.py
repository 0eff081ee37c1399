"""Clips for pretraining, drawn once and stored in one file."""

from pathlib import Path
from typing import NamedTuple

import numpy as np
from jaxtyping import Int8, UInt8
from tqdm import tqdm

from experiments.moving_shapes.draw import NUM_TOKENS, TokenLabels, random_clip
from experiments.moving_shapes.scene import NUM_FRAMES, SIDE, Scene

# Part of a clip's seed, so that different splits never have the same clip.
SPLITS = {"train": 0, "validation": 1, "test": 2, "pretrain": 3}


class Pool(NamedTuple):
    """Clips with labels of their visual tokens.

    Attributes:
        frames: [i, frames, side, side, 3] frames of each clip, in a memory-mapped file.
        labels: [i, n] labels of the visual tokens.
        scenes: the scene of each clip.
    """

    frames: UInt8[np.ndarray, "i frames side side 3"]
    labels: TokenLabels
    scenes: list[Scene]


def clip_at(
    seed: int, split: str, number: int
) -> tuple[Scene, UInt8[np.ndarray, "frames side side 3"], TokenLabels, np.random.Generator]:
    """Returns a clip of a split, and the generator of random numbers for its questions."""
    rng = np.random.default_rng([seed, SPLITS[split], number])
    return *random_clip(rng), rng


def draw_pool(folder: Path, seed: int, count: int) -> Pool:
    """Draws the clips of pretraining, or reads clips that are already in the folder.

    An interrupted call continues with the first clip that is missing.
    """
    folder.mkdir(parents=True, exist_ok=True)
    shape = (count, NUM_FRAMES, SIDE, SIDE, 3)
    file, labels_file, done_file = (folder / name for name in ("f.npy", "labels.npy", "done"))
    if not done_file.is_file():
        np.lib.format.open_memmap(file, "w+", np.uint8, shape)
        np.lib.format.open_memmap(labels_file, "w+", np.int8, (count, 5, NUM_TOKENS))
        done_file.write_text("0")
    frames, labels = (np.lib.format.open_memmap(path, "r+") for path in (file, labels_file))
    num_done = int(done_file.read_text())
    for number in tqdm(range(num_done, count), "drawing", count, initial=num_done, mininterval=10):
        _, frames[number], clip_labels, _ = clip_at(seed, "pretrain", number)
        labels[number] = clip_labels
        if (number + 1) % 100 == 0 or number + 1 == count:
            frames.flush()
            labels.flush()
            done_file.write_text(str(number + 1))
    raise NotImplementedError
