"""Writes a matrix in the format of `torch.save`, without torch.

Engines take embeddings in this format. A file is a zip archive with the bytes of the matrix, and
with a pickle that describes dtype and shape.
"""

import io
import struct
import sys
import zipfile

import numpy as np
from jaxtyping import Float

_STORAGES = {"float32": b"FloatStorage", "bfloat16": b"BFloat16Storage", "float16": b"HalfStorage"}


def tensor_file(matrix: Float[np.ndarray, "s e"]) -> bytes:
    """Returns the bytes of a file that `torch.load(..., weights_only=True)` reads as the matrix.

    Args:
        matrix: [s, e] of float32, bfloat16 or float16.
    """
    num_rows, num_columns = matrix.shape
    # The pickle calls torch._utils._rebuild_tensor_v2(storage, offset, shape, strides,
    # requires_grad=False, backward_hooks=OrderedDict()). Opcodes: \x80\x02 is protocol 2, c a
    # global name, "(...t" a tuple, Q an object that is stored outside the pickle, \x86 a pair,
    # \x89 False, ) an empty tuple, R a call, and . the end.
    storage_type = b"ctorch\n" + _STORAGES[matrix.dtype.name] + b"\n"
    storage = (
        b"("
        + _pickle_text("storage")
        + storage_type
        + _pickle_text("0")
        + _pickle_text("cpu")
        + _pickle_int(matrix.size)
        + b"tQ"
    )
    offset = _pickle_int(0)
    shape = _pickle_int(num_rows) + _pickle_int(num_columns) + b"\x86"
    strides = _pickle_int(num_columns) + _pickle_int(1) + b"\x86"
    pickle = b"\x80\x02ctorch._utils\n_rebuild_tensor_v2\n(" + storage + offset + shape + strides
    pickle += b"\x89ccollections\nOrderedDict\n)RtR."
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as archive:
        archive.writestr("archive/data.pkl", pickle)
        archive.writestr("archive/byteorder", sys.byteorder)
        archive.writestr("archive/data/0", matrix.tobytes())
        archive.writestr("archive/version", b"3\n")
    return file.getvalue()


def _pickle_text(text: str) -> bytes:
    """Returns the opcode that pushes a text on the unpickler's stack."""
    return b"X" + struct.pack("<I", len(text)) + text.encode()


def _pickle_int(number: int) -> bytes:
    """Returns the opcode that pushes an int32 on the unpickler's stack."""
    return b"J" + struct.pack("<i", number)
