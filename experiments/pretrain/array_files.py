"""Reads files of arrays that are not trusted."""

from collections.abc import Callable
from pathlib import Path

import numpy as np

from stepprune_jax.user_input import UserError

# Types of arrays: codes of `dtype.kind`, and their name in messages.
INTEGERS, NUMBERS, TEXT = ("iu", "integers"), ("biuf", "finite numbers"), ("U", "text")
Kind = tuple[str, str]


def read_arrays(file: str | Path, kind: Callable[[str], Kind]) -> dict[str, np.ndarray]:
    """Reads all arrays of an `.npz` file.

    Args:
        file: the file.
        kind: returns the expected type of an array from its name.

    Raises:
        UserError: the file is damaged, or an array has another type or infinite values.
    """
    with Path(file).open("rb") as handle:  # numpy would not close a damaged file.
        try:
            with np.load(handle, allow_pickle=False) as archive:
                arrays = dict(archive)
        except Exception as error:  # A damaged file may raise any exception.
            reason = " ".join(str(error).split()) or type(error).__name__
            raise UserError(f"{file}: not a readable .npz file: {reason}") from error
    for name, array in arrays.items():
        kinds, expected = kind(name)
        if array.dtype.kind not in kinds or (array.dtype.kind == "f" and np.isinf(array).any()):
            raise UserError(f"{file}: {name} has {array.dtype}, expected {expected}")
    return arrays
