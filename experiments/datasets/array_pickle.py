"""Pickles of numpy arrays, lists and numbers, read without running any code that they name.

A pickle names functions, which Python imports and calls. Here the names that numpy writes resolve
to stand-ins in this module, and any other name is an error. Numpy itself only receives bytes, as
its own functions trust the state that a pickle gives them.
"""

import pickle
import re
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from stepprune_jax.user_input import UserError


class Array:
    """An array of numbers.

    Attributes:
        values: the array.
    """

    values: np.ndarray = np.empty(0)

    def __setstate__(self, state: tuple) -> None:
        _, shape, dtype, fortran, raw = state
        self.values = _values(raw, dtype, shape, "F" if fortran else "C")


def read_pickle(file: str | Path) -> Any:
    """Reads a pickle of arrays, lists, tuples, numbers and strings."""
    path = Path(file)
    if not path.is_file():
        raise FileNotFoundError(f"no file at {path}")
    try:
        with path.open("rb") as handle:
            return _Unpickler(handle).load()
    except _RefusedError as error:
        raise UserError(
            f"{path}: names {error}, which is not loaded, as it could run any code: expected a "
            "pickle of numpy arrays of numbers, lists, tuples, numbers and strings alone"
        ) from None
    except OSError:
        raise
    except MemoryError as error:
        raise UserError(f"{path} needs more memory than is available") from error
    except Exception as error:  # a damaged file may raise any kind
        reason = " ".join(str(error).split()) or type(error).__name__
        raise UserError(f"{path}: not a readable pickle: {reason}") from error


class _RefusedError(Exception):
    """A pickle names an object that must not be loaded."""


class _Unpickler(pickle.Unpickler):
    """An unpickler that knows only `_KNOWN`; strings of Python 2, such as bytes, are Latin-1."""

    def __init__(self, handle: BinaryIO):
        super().__init__(handle, encoding="latin1")

    def find_class(self, module: str, name: str) -> Any:
        # numpy 2 has its modules in numpy._core.
        known = f"{module}.{name}".replace("numpy._core.", "numpy.core.", 1)
        if known not in _KNOWN:
            raise _RefusedError(repr(f"{module}.{name}"))
        return _KNOWN[known]


class _Dtype:
    """Stands in for `numpy.dtype`, for types of numbers."""

    def __init__(self, code: str, *_: Any):
        if not re.fullmatch("[biuf][1248]", code):
            raise _RefusedError(f"the dtype {code!r}")
        self.dtype = np.dtype(code)

    def __setstate__(self, state: tuple) -> None:
        if state[1] == ">":
            self.dtype = self.dtype.newbyteorder(">")


def _values(raw: Any, dtype: _Dtype, shape: tuple[int, ...], order: Any) -> np.ndarray:
    raw = raw.encode("latin1") if isinstance(raw, str) else raw
    return np.frombuffer(raw, dtype.dtype).reshape(shape, order=order)


def _reconstruct(*_: Any) -> Array:
    """Returns an array whose state is set later."""
    return Array()


def _from_buffer(
    raw: bytes | bytearray, dtype: _Dtype, shape: tuple[int, ...], order: str
) -> Array:
    """Builds an array of pickle protocol 5."""
    array = Array()
    array.values = _values(raw, dtype, shape, order)
    return array


def _scalar(dtype: _Dtype, raw: bytes | str) -> bool | int | float:
    return _values(raw, dtype, (), "C").item()


def _encode(text: str, codec: str) -> bytes:
    """Decodes bytes as Python 3 writes them for Python 2."""
    if codec != "latin1":
        raise _RefusedError(f"the codec {codec!r}")
    return text.encode("latin1")


_KNOWN = {
    "_codecs.encode": _encode,
    "numpy.core.multiarray._reconstruct": _reconstruct,
    "numpy.core.multiarray.scalar": _scalar,
    "numpy.core.numeric._frombuffer": _from_buffer,
    "numpy.dtype": _Dtype,
    "numpy.ndarray": Array,
}
