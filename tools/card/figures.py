"""Writes the measurements of a section as JSON lines, and formats them as tables."""

import itertools
import json
import re
from pathlib import Path
from typing import Any

from stepprune_jax.cli.command_line import Parser
from stepprune_jax.evaluation.cells import markdown_rows

# Lines of logs that belong to the summary: rows of the efficiency table, and results of tests.
_SUMMARY_LINES = re.compile(
    r"^\| .*|^.* is left out: .*|^tests/\S+::.*|^=+ .*(?:passed|failed|error).*", re.M
)


def parser(description: str) -> Parser:
    """Builds the parser of a section's command."""
    flags = Parser(description=description.splitlines()[0])
    flags.add_argument("--out", type=Path, required=True, help="file for the measurements")
    flags.add_argument("--model", required=True, help="a name, or a config.json")
    return flags


def add(file: Path, subject: str, **measurements: Any) -> None:
    """Appends the measurements of one subject to a file."""
    with file.open("a", encoding="utf-8") as out:
        out.write(json.dumps({"what": subject, **_round(measurements)}) + "\n")


def _round(value: Any) -> Any:
    """Rounds all numbers to four significant digits."""
    if isinstance(value, dict):
        return {name: _round(part) for name, part in value.items()}
    if isinstance(value, list):
        return [_round(part) for part in value]
    return float(f"{value:.4g}") if isinstance(value, float) else value


def read(folder: Path, section: str) -> str:
    """Formats the measurements of a section, and the lines of its log for the summary."""
    lines, log = folder / f"{section}.jsonl", folder / f"{section}.log"
    # A process that was ended may have left an incomplete last line.
    complete_lines = (
        lines.read_text(encoding="utf-8").rpartition("\n")[0] if lines.is_file() else ""
    )
    groups = itertools.groupby(map(json.loads, complete_lines.splitlines()), key=tuple)
    tables = [
        markdown_rows(names, [[*map(_text, row.values())] for row in rows])
        for names, rows in groups
    ]
    log_text = log.read_text(encoding="utf-8", errors="replace") if log.is_file() else ""
    log_lines = "\n".join(_SUMMARY_LINES.findall("\n".join(log_text.splitlines())))
    return "\n".join([*tables, log_lines]).strip() + "\n"


def _text(value: Any) -> str:
    """Formats a cell. A list has a median, a minimum and a maximum."""
    return "{} ({} to {})".format(*value) if isinstance(value, list) else str(value)
