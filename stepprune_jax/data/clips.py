"""Reads the shapes of a training file's videos before training, in parallel.

The shape of a video determines its number of visual tokens and, for Qwen3-VL, the ids of its
prompt.
"""

import concurrent.futures
import os
from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np
from jaxtyping import Bool, Int
from tqdm import tqdm

from stepprune_jax.data.index import UNREADABLE, USABLE, Index
from stepprune_jax.data.source import VideoSampling
from stepprune_jax.data.videos import ClipShape, NoVideosError, Video
from stepprune_jax.user_input import UserError

# Reading the times of a file's frames waits for the disk, so several files are read together.
_NUM_THREADS = 8

# Maps a video to its shape; see `models.backbone.Backbone.inspect_video`.
InspectFn = Callable[[Video], ClipShape]


def file_stamp(path: Path) -> int:
    """Returns a number that changes with the size and the time of a file; -1 for no file."""
    try:
        status = os.stat(path)
    except (OSError, ValueError):  # ValueError: a name that no file can have
        return -1
    return (status.st_mtime_ns ^ (status.st_size << 20)) & (2**62 - 1)


def video_stamps(index: Index, root: Path) -> Int[np.ndarray, " i"]:
    """Returns the stamp of each video file of an index; 0 for images."""
    stamps = np.zeros(len(index.names), np.int64)
    for image in np.flatnonzero(index.is_video).tolist():
        stamps[image] = file_stamp(root / index.names[image])
    return stamps


def inspect_videos(
    index: Index,
    is_missing: Bool[np.ndarray, " r"],
    root: Path,
    sampling: VideoSampling,
    inspect: InspectFn,
) -> tuple[Index, Mapping[int, Exception]]:
    """Reads the shapes of all videos of an index that exist.

    Args:
        index: result of `scan`.
        is_missing: [r] whether the file of a row is missing.
        root: folder that names of videos are relative to.
        sampling: sampling of the frames of videos.
        inspect: maps a video to its shape.

    Returns:
        The index with the shapes. Usable rows of unreadable videos become `UNREADABLE`. And the
        error of each unreadable video, by its index in `Index.names`.

    Raises:
        NoVideosError: the model reads no videos.
        MissingPackageError: PyAV is not installed.
    """
    index = index._replace(stamp=video_stamps(index, root))
    is_inspected = (index.problem == USABLE) & ~is_missing
    videos = [image for image in np.unique(index.image[is_inspected]) if index.is_video[image]]

    def inspect_one(image: int) -> ClipShape | Exception:
        try:
            return inspect(Video(root / index.names[image], *sampling))
        except NoVideosError:
            raise
        except (OSError, MemoryError, UserError) as error:
            return error

    shapes: dict[int, ClipShape] = {}
    errors: dict[int, Exception] = {}
    with concurrent.futures.ThreadPoolExecutor(_NUM_THREADS) as pool:
        results = pool.map(inspect_one, videos)
        for image, shape in tqdm(
            zip(videos, results, strict=True),
            desc="reading videos",
            unit="video",
            total=len(videos),
            disable=None if videos else True,
        ):
            if isinstance(shape, ClipShape):
                shapes[int(image)] = shape
            else:
                errors[int(image)] = shape
    patches, grid = np.zeros_like(index.patches), np.zeros_like(index.grid)
    times: list[float] = []
    for image, shape in sorted(shapes.items()):
        patches[image], grid[image] = len(shape.times), shape.grid
        times += shape.times
    is_unreadable = is_inspected & np.isin(index.image, list(errors))
    problem = np.where(is_unreadable, UNREADABLE, index.problem)
    index = index._replace(patches=patches, grid=grid, times=np.array(times), problem=problem)
    return index, errors
