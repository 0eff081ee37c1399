"""Figures of a section: an object a line, on disk as soon as each is known, and their tables."""

import itertools
import json
import re
from pathlib import Path
from typing import Any

from stepprune_jax.cli.command_line import Parser
from stepprune_jax.evaluation.cells import markdown_rows

# Rows of the table of efficiency, those that it leaves out, and results of tests.
_TOLD = re.compile(
    r"^\| .*|^.* is left out: .*|^tests/\S+::.*|^=+ .*(?:passed|failed|error).*", re.M
)


def parser(description: str) -> Parser:
    """Builds the parser of a section's command."""
    flags = Parser(description=description.splitlines()[0])
    flags.add_argument("--out", type=Path, required=True, help="file for the figures")
    flags.add_argument("--model", required=True, help="a name, or a config.json")
    return flags


def add(file: Path, what: str, **figures: Any) -> None:
    """Writes figures of one thing."""
    with file.open("a", encoding="utf-8") as out:
        out.write(json.dumps({"what": what, **_rounded(figures)}) + "\n")


def _rounded(value: Any) -> Any:
    """Keeps four digits of numbers."""
    if isinstance(value, dict):
        return {name: _rounded(part) for name, part in value.items()}
    if isinstance(value, list):
        return [_rounded(part) for part in value]
    return float(f"{value:.4g}") if isinstance(value, float) else value


def read(folder: Path, section: str) -> str:
    """Formats what a section has found so far: its lines, and what its log tells of a result."""
    lines, log = folder / f"{section}.jsonl", folder / f"{section}.log"
    # The last line may be unfinished, if its process was ended.
    whole = lines.read_text(encoding="utf-8").rpartition("\n")[0] if lines.is_file() else ""
    found = itertools.groupby(map(json.loads, whole.splitlines()), key=tuple)
    parts = [
        markdown_rows(names, [[*map(_text, x.values())] for x in some]) for names, some in found
    ]
    said = log.read_text(encoding="utf-8", errors="replace") if log.is_file() else ""
    told = "\n".join(_TOLD.findall("\n".join(said.splitlines())))
    return "\n".join([*parts, told]).strip() + "\n"


def _text(value: Any) -> str:
    """Formats a cell; of three numbers, the first is a median."""
    return "{} ({} to {})".format(*value) if isinstance(value, list) else str(value)
