"""Finds the image files of a data set, and checks that they exist inside their folder."""

import concurrent.futures
import itertools
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


def image_name(json_object: Mapping[str, object], place: str, field_name: str = "image") -> str:
    """Returns the field "image" of a JSON object, and checks that it is a safe relative path.

    Args:
        json_object: the fields of the object by name.
        place: file and line of the object, for messages.
        field_name: "image", or "video" for the name of a video.

    Returns:
        The path of the image relative to the image folder.

    Raises:
        ImagePathError: the path leaves the folder.
        ValueError: the field is missing or is not text.
    """
    name = words(json_object, field_name, place, f"the name of one {field_name}")
    is_outside = os.path.normpath(name).split(os.sep)[0] == os.pardir
    if is_outside or os.path.isabs(name) or PureWindowsPath(name).drive:
        raise ImagePathError(
            f'{place}: "{field_name}" must be a path inside the image folder, got {name!r}'
        )
    return name


def existing_image(root: str | Path, name: str, place: str, field_name: str = "image") -> Path:
    """Returns the path of an image, which must exist. A symbolic link may lead out of `root`.

    Args:
        root: the image folder.
        name: path of the image relative to the folder.
        place: file and line that name the image, for messages.
        field_name: "image", or "video" for a video.

    Raises:
        FileNotFoundError: there is no such file.
    """
    path = Path(root) / name
    if not os.path.isfile(path):  # also False for names that no file can have
        hint = "" if os.path.isdir(root) else ", and the image folder does not exist"
        raise FileNotFoundError(f'{place}: "{field_name}": no file at {path}{hint}')
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
        self._allowed_folders = [os.path.realpath(folder) for folder in (root, *linked)]

    def check(self, names: Sequence[str]) -> Int[np.ndarray, " n"]:
        """Checks whether images exist inside the folder.

        Args:
            names: n paths relative to the folder.

        Returns:
            [n] `PRESENT`, `MISSING` or `OUTSIDE` for each name. An empty file is `MISSING`. A link
            that leads out of all allowed folders is `OUTSIDE`.
        """
        starts = range(0, len(names), _NAMES_PER_TASK)
        tasks = [names[start : start + _NAMES_PER_TASK] for start in starts]
        with concurrent.futures.ThreadPoolExecutor(_NUM_THREADS) as pool:
            states = itertools.chain.from_iterable(pool.map(self._check_names, tasks))
            return np.fromiter(states, np.int8)

    def _check_names(self, names: Sequence[str]) -> list[int]:
        """Checks the images of one task, and returns their states."""
        real_folders: dict[str, str] = {}
        return [self._check_name(name, real_folders) for name in names]

    def _check_name(self, name: str, real_folders: dict[str, str]) -> int:
        """Checks one image.

        Args:
            name: path relative to the folder.
            real_folders: cache of resolved paths of folders, because many images share a folder. A
                new folder is added.

        Returns:
            `PRESENT`, `MISSING` or `OUTSIDE`.
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
        # The final separator keeps "/data/images_2" from counting as inside "/data/images".
        prefixes = [os.path.join(folder, "") for folder in self._allowed_folders]
        if not path.startswith(tuple(prefixes)):
            return OUTSIDE
        return PRESENT if stat.S_ISREG(status.st_mode) and status.st_size else MISSING
