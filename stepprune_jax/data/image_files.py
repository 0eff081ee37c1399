"""Files of a data set's images, and whether they exist."""

import concurrent.futures
import os
import stat
from collections.abc import Mapping, Sequence
from pathlib import Path, PureWindowsPath

import numpy as np
from jaxtyping import Int

from stepprune_jax.data.json_files import words
from stepprune_jax.user_input import UserError

# Threads that query a file system, which may be remote, and names per query.
_THREADS = 16
_PART = 1000

PRESENT, MISSING, OUTSIDE = 0, 1, 2


class ImagePathError(UserError):
    """An image's path leaves its folder."""


def image_name(value: Mapping[str, object], where: str) -> str:
    """Reads the field "image" of an object."""
    name = words(value, "image", where, "the name of one image")
    outside = os.path.normpath(name).split(os.sep)[0] == os.pardir
    if outside or os.path.isabs(name) or PureWindowsPath(name).drive:
        raise ImagePathError(
            f'{where}: "image" must be a path inside the image folder, got {name!r}'
        )
    return name


def existing_image(root: str | Path, name: str, where: str) -> Path:
    """Returns the file of an image; links inside the root may lead anywhere."""
    path = Path(root) / name
    if not os.path.isfile(path):  # also False for names that no file can have
        hint = "" if os.path.isdir(root) else ", and the image folder does not exist"
        raise FileNotFoundError(f'{where}: "image": no file at {path}{hint}')
    return path


class ImageFolder:
    """An image folder whose paths and links must stay inside it.

    The files of a downloaded data set are chosen by its author, including links. A link may lead
    out of the folder only into one that the user has named.
    """

    def __init__(self, root: str | Path, linked: Sequence[str | Path] = ()):
        """Resolves the folders."""
        self.root = Path(root)
        self._inside = [os.path.realpath(folder) for folder in (root, *linked)]

    def check(self, names: Sequence[str]) -> Int[np.ndarray, " n"]:
        """Checks whether images exist."""
        parts = [names[start : start + _PART] for start in range(0, len(names), _PART)]
        with concurrent.futures.ThreadPoolExecutor(_THREADS) as pool:
            return np.array([x for part in pool.map(self._check, parts) for x in part], np.int8)

    def _check(self, names: Sequence[str]) -> list[int]:
        real: dict[str, str] = {}  # folders are few and are resolved once
        return [self._check_one(name, real) for name in names]

    def _check_one(self, name: str, real: dict[str, str]) -> int:
        folder, file = os.path.split(os.path.join(self.root, name))
        try:
            if folder not in real:
                real[folder] = os.path.realpath(folder)
            path = os.path.join(real[folder], file)
            status = os.lstat(path)
            if stat.S_ISLNK(status.st_mode):
                path = os.path.realpath(path)
                status = os.stat(path)
        except (OSError, ValueError):  # the latter for names that no file can have
            return MISSING
        if not any(path.startswith(os.path.join(inside, "")) for inside in self._inside):
            return OUTSIDE
        return PRESENT if stat.S_ISREG(status.st_mode) and status.st_size else MISSING
