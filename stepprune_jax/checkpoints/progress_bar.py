"""How far a long read has come, on stderr."""

import sys
import time
from pathlib import Path

import tqdm


class ByteBar:
    """A bar of bytes; where stderr is not a terminal, one line at the end.

    Use it as a context: the closing line, with the speed, is left out after an error.
    """

    def __init__(self, folder: Path, total: int, show: bool = True):
        """Opens the bar.

        Args:
            folder: what is being read, for the text.
            total: bytes to come.
            show: False for silence.
        """
        self._folder, self._show, self._done = folder, show, 0
        self._bar = tqdm.tqdm(
            total=total,
            unit="B",
            unit_scale=True,
            desc=f"loading {folder.name}",
            disable=not (show and sys.stderr.isatty()),
        )
        self._start = time.perf_counter()

    def __enter__(self) -> "ByteBar":
        return self

    def add(self, count: int) -> None:
        """Counts bytes that have arrived."""
        self._done += count
        self._bar.update(count)

    def __exit__(self, kind: type | None, *_: object) -> None:
        self._bar.close()
        if self._show and kind is None:
            seconds = time.perf_counter() - self._start
            size = self._done / 1e9
            print(
                f"loaded {size:.2f} GB from {self._folder} in {seconds:.1f} s "
                f"({size / seconds:.2f} GB/s)",
                file=sys.stderr,
            )
