"""Finds the image files of a data set, and checks that they exist inside their folder."""

import concurrent.futures
import os
import stat
from collections.abc import Mapping, Sequence
from pathlib import Path, PureWindowsPath

import numpy as np
from jaxtyping import Int

from stepprune_jax.data.json_files import words
from stepprune_jax.user_input import UserError

# A remote file system takes milliseconds per query, so several queries run at the same time.
_NUM_THREADS = 16
# Names per task of a thread, which keeps the cost of the thread pool small.
_NAMES_PER_TASK = 1000

# Results of `ImageFolder.check`.
PRESENT, MISSING, OUTSIDE = 0, 1, 2


class ImagePathError(UserError):
    """Raised for an image whose path leaves its folder."""


def image_name(value: Mapping[str, object], place: str) -> str:
    """Reads the field "image" of a JSON object.

    Args:
        value: the object.
        place: file and number of the object, for messages.

    Returns:
        The path of the image relative to the image folder.

    Raises:
        ImagePathError: the path leaves the folder.
        ValueError: the field is missing or is not text.
    """
    name = words(value, "image", place, "the name of one image")
    is_outside = os.path.normpath(name).split(os.sep)[0] == os.pardir
    if is_outside or os.path.isabs(name) or PureWindowsPath(name).drive:
        raise ImagePathError(
            f'{place}: "image" must be a path inside the image folder, got {name!r}'
        )
    return name


def existing_image(root: str | Path, name: str, place: str) -> Path:
    """Returns the path of an image. A symbolic link may lead out of the root.

    Raises:
        FileNotFoundError: there is no such file.
    """
    path = Path(root) / name
    if not os.path.isfile(path):  # also False for names that no file can have
        hint = "" if os.path.isdir(root) else ", and the image folder does not exist"
        raise FileNotFoundError(f'{place}: "image": no file at {path}{hint}')
    return path


class ImageFolder:
    """An image folder whose files must lie inside it.

    The author of a downloaded data set chooses its files and links. A link could otherwise read any
    image of the user's disk.
    """

    def __init__(self, root: str | Path, linked: Sequence[str | Path] = ()):
        """Stores the folder.

        Args:
            root: the image folder.
            linked: other folders that links in the image folder may lead to.
        """
        self.root = Path(root)
        self._allowed = [os.path.realpath(folder) for folder in (root, *linked)]

    def check(self, names: Sequence[str]) -> Int[np.ndarray, " n"]:
        """Checks whether images exist inside the folder.

        Args:
            names: paths relative to the folder.

        Returns:
            `PRESENT`, `MISSING` or `OUTSIDE` for each name. An empty file is `MISSING`.
        """
        starts = range(0, len(names), _NAMES_PER_TASK)
        tasks = [names[start : start + _NAMES_PER_TASK] for start in starts]
        with concurrent.futures.ThreadPoolExecutor(_NUM_THREADS) as pool:
            states = [state for part in pool.map(self._check, tasks) for state in part]
        return np.array(states, np.int8)

    def _check(self, names: Sequence[str]) -> list[int]:
        real_folders: dict[str, str] = {}  # there are few folders, and each is resolved once
        return [self._check_one(name, real_folders) for name in names]

    def _check_one(self, name: str, real_folders: dict[str, str]) -> int:
        """Checks one image.

        Args:
            name: path relative to the folder.
            real_folders: resolved path by folder; a new folder is added.
        """
        folder, file = os.path.split(os.path.join(self.root, name))
        try:
            if folder not in real_folders:
                real_folders[folder] = os.path.realpath(folder)
            path = os.path.join(real_folders[folder], file)
            status = os.lstat(path)
            if stat.S_ISLNK(status.st_mode):
                path = os.path.realpath(path)
                status = os.stat(path)
        except (OSError, ValueError):  # ValueError: a name that no file can have
            return MISSING
        if not any(path.startswith(os.path.join(folder, "")) for folder in self._allowed):
            return OUTSIDE
        return PRESENT if stat.S_ISREG(status.st_mode) and status.st_size else MISSING
