"""Files of a benchmark under a root in LLaVA's layout (`playground/data/eval`)."""

from pathlib import Path

from stepprune_jax.data.json_files import replace_file


def folder(root: str | Path, *names: str) -> Path:
    """Finds the folder of a benchmark.

    Args:
        root: folder that holds one folder per benchmark.
        names: possible names of the folder, the preferred one first.

    Returns:
        The first of them that exists.

    Raises:
        FileNotFoundError: none exists, or the root does not.
    """
    root = Path(root)
    for name in names:
        if (root / name).is_dir():
            return root / name
    wanted = " or ".join(f"{name}/" for name in names)
    raise FileNotFoundError(
        f"no folder {wanted} in {root}: expected the root of LLaVA's layout (playground/data/eval)"
    )


def file(path: Path, source: str) -> Path:
    """Checks that a file of the benchmark exists.

    Args:
        path: its path in the layout.
        source: where to get it, for the message.

    Returns:
        The path.

    Raises:
        FileNotFoundError: it is missing.
    """
    if not path.is_file():
        raise FileNotFoundError(f"no file at {path}: get it from {source}")
    return path


def size_warnings(what: str, count: int, published: int) -> list[str]:
    """Compares the size of a list with that of the published one.

    Args:
        what: description of the list, as file name and unit.
        count: its size.
        published: size of the published list.

    Returns:
        No warning, or one that gives both numbers.
    """
    if count == published:
        return []
    return [f"{what}: {count:,} here, {published:,} in the published list"]


def write_submission(out: str | Path, content: bytes) -> Path:
    """Writes a submission atomically, so that an interrupted run keeps the earlier file.

    Args:
        out: the file; its folder is created if missing.
        content: its content.

    Returns:
        `out`.

    Raises:
        OSError: it cannot be written, for example because `out` is a folder.
    """
    out = Path(out)
    if out.is_dir():
        raise IsADirectoryError(f"{out} is a folder: expected the name of a file")
    out.parent.mkdir(parents=True, exist_ok=True)
    replace_file(out, content)
    return out
