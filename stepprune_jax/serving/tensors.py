"""A matrix in the format of `torch.save`, without torch: what engines take as embeddings.

It is a zip file of a pickle, which names the storage and its shape, and of the numbers themselves.
"""

import io
import struct
import sys
import zipfile

import numpy as np
from jaxtyping import Float

_STORAGES = {"float32": b"FloatStorage", "bfloat16": b"BFloat16Storage", "float16": b"HalfStorage"}


def tensor_file(matrix: Float[np.ndarray, "s e"]) -> bytes:
    """Returns the file that `torch.save` writes of a matrix.

    Args:
        matrix: [s, e] of float32, bfloat16 or float16.

    Returns:
        What `torch.load(..., weights_only=True)` reads.
    """
    rows, columns = matrix.shape
    # Opcodes of pickle: \x80\x02 its version, c a global, ( ... t a tuple, Q an object stored
    # elsewhere, \x86 a pair, \x89 False, ) an empty tuple, R a call, . the end.
    storage = b"ctorch\n" + _STORAGES[matrix.dtype.name] + b"\n"
    stored = (
        b"(" + _text("storage") + storage + _text("0") + _text("cpu") + _int(matrix.size) + b"tQ"
    )
    shape = _int(0) + _int(rows) + _int(columns) + b"\x86" + _int(columns) + _int(1) + b"\x86"
    pickle = b"\x80\x02ctorch._utils\n_rebuild_tensor_v2\n(" + stored + shape
    pickle += b"\x89ccollections\nOrderedDict\n)RtR."
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as archive:
        archive.writestr("archive/data.pkl", pickle)
        archive.writestr("archive/byteorder", sys.byteorder)
        archive.writestr("archive/data/0", matrix.tobytes())
        archive.writestr("archive/version", b"3\n")
    return file.getvalue()


def _text(text: str) -> bytes:
    return b"X" + struct.pack("<I", len(text)) + text.encode()


def _int(number: int) -> bytes:
    return b"J" + struct.pack("<i", number)
