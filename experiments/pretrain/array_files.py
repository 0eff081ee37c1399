"""Arrays in files of numpy, read without trusting them."""

from collections.abc import Callable
from pathlib import Path

import numpy as np

from stepprune_jax.user_input import UserError

# What an array may hold: kinds of dtypes, and their name in messages.
INTEGERS, NUMBERS, TEXT = ("iu", "integers"), ("biuf", "finite numbers"), ("U", "text")
Kind = tuple[str, str]


def read_arrays(file: str | Path, kind: Callable[[str], Kind]) -> dict[str, np.ndarray]:
    """Reads all arrays of an ``.npz`` file."""
    arrays = _read(Path(file))
    for name, array in arrays.items():
        kinds, expected = kind(name)
        if array.dtype.kind not in kinds or (array.dtype.kind == "f" and np.isinf(array).any()):
            raise UserError(f"{file}: {name} holds {array.dtype}, expected {expected}")
    return arrays


def _read(file: Path) -> dict[str, np.ndarray]:
    with file.open("rb") as handle:  # opened here, as numpy leaves a damaged file open
        try:
            with np.load(handle, allow_pickle=False) as arrays:
                return dict(arrays)
        except Exception as error:  # a damaged file may raise any kind
            reason = " ".join(str(error).split()) or type(error).__name__
            raise UserError(f"{file}: not a readable .npz file: {reason}") from error
