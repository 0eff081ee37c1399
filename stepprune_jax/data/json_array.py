"""A JSON list that is too long for memory: offsets of its entries, which are read on demand.

LLaVA's training file has a gigabyte of text. Parsed, it would take several gigabytes in each
process; the offsets of its 665 thousand entries take ten megabytes.
"""

import codecs
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import numpy as np
from jaxtyping import Int

from stepprune_jax.data.json_files import parse_json, read_json_list

# Bytes read at a time.
_CHUNK = 1 << 22


class Entry(NamedTuple):
    """One entry of a list, with its offsets.

    Attributes:
        start: offset of its first byte in the file.
        end: offset after its last byte.
        value: the entry, parsed.
    """

    start: int
    end: int
    value: object


def scan_json_list(file: str | Path, kind: str = "entry") -> Iterator[Entry]:
    """Scans a file that holds one JSON list, a few megabytes at a time."""
    count = 0
    try:
        with open(file, "rb") as opened:
            for entry in _entries(_Text(opened)):
                count += 1
                yield entry
    except (ValueError, RecursionError) as error:  # not JSON, not UTF-8, nested too deep
        read_json_list(file, kind)  # raises with the place in the whole file
        raise ValueError(f"{file} has changed while it was read") from error
    if not count:
        read_json_list(file, kind)


class JsonEntries:
    """Entries of a JSON list by number, read from the file each time.

    May be used by several threads.
    """

    def __init__(self, file: str | Path, start: Int[np.ndarray, " s"], end: Int[np.ndarray, " s"]):
        """Takes the places of the entries."""
        self.file, self._start, self._end = Path(file), start, end

    def __len__(self) -> int:
        return len(self._start)

    def __getitem__(self, number: int) -> Any:
        start, end = int(self._start[number]), int(self._end[number])
        with open(self.file, "rb") as file:
            file.seek(start)
            data = file.read(end - start)
        try:
            return parse_json(data, str(self.file))
        except ValueError as error:
            raise ValueError(
                f"{self.file}: sample {number} is not where it was: the file has changed"
            ) from error


class _Text:
    """The text of a file from an offset on, and that offset in bytes."""

    def __init__(self, file: BinaryIO):
        self._file, self._decoder = file, codecs.getincrementaldecoder("utf-8")()
        mark = file.read(len(codecs.BOM_UTF8)) == codecs.BOM_UTF8
        self.offset = len(codecs.BOM_UTF8) if mark else 0
        file.seek(self.offset)
        self.text, self.at, self._ended = "", 0, False

    def more(self) -> bool:
        """Drops consumed text and reads on, at least doubling the rest; False at the end."""
        if self._ended:
            return False
        left = self.text[self.at :]
        data = self._file.read(max(_CHUNK, len(left)))
        self._ended = not data
        self.text, self.at = left + self._decoder.decode(data, final=self._ended), 0
        return True

    def advance(self, end: int) -> None:
        """Consumes the text up to index `end`."""
        passed = self.text[self.at : end]
        self.offset += len(passed) if passed.isascii() else len(passed.encode())
        self.at = end

    def peek(self) -> str:
        """Skips blanks and returns the next character; "" at the end."""
        while True:
            end = self.at
            while end < len(self.text) and self.text[end] in " \t\r\n":
                end += 1
            self.advance(end)
            if end < len(self.text):
                return self.text[end]
            if not self.more():
                return ""

    def take(self, character: str) -> None:
        """Consumes a character that must come next."""
        if self.peek() != character:
            raise ValueError(f"expected {character}")
        self.advance(self.at + 1)


def _entries(text: _Text) -> Iterator[Entry]:
    """Yields the entries of a list; any mistake is a ValueError."""
    decoder = json.JSONDecoder()
    text.take("[")
    if text.peek() != "]":
        while True:
            text.peek()
            value, end = _value(text, decoder)
            start = text.offset
            text.advance(end)
            yield Entry(start, text.offset, value)
            if text.peek() == "]":
                break
            text.take(",")
    text.take("]")
    if text.peek():
        raise ValueError("text after the list")


def _value(text: _Text, decoder: json.JSONDecoder) -> tuple[object, int]:
    """Returns the next value, and the index after it."""
    while True:
        try:
            value, end = decoder.raw_decode(text.text, text.at)
            # One that ends with the text read so far may be half a number.
            if end < len(text.text) or not text.more():
                return value, end
        except json.JSONDecodeError:
            if not text.more():
                raise
