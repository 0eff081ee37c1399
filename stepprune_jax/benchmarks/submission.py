"""Writes submissions whole: a run that is stopped leaves the earlier file as it was."""

import os
from pathlib import Path


def write_submission(out: str | Path, content: bytes) -> Path:
    """Writes a file by its side and puts it in place at the end.

    Args:
        out: the file; its folder is made where there is none.
        content: all of it.

    Returns:
        `out`.

    Raises:
        OSError: it cannot be written, as where `out` is a folder.
    """
    out = Path(out)
    if out.is_dir():
        raise IsADirectoryError(f"{out} is a folder: expected the name of a file")
    out.parent.mkdir(parents=True, exist_ok=True)
    partial = out.with_name(f"{out.name}.partial")
    partial.write_bytes(content)
    os.replace(partial, out)
    return out
