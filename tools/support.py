"""Prints which model families can do what, by the record of the tests.

    make support                        # runs the tests, and writes the table to README.md
    python -m tools.support             # prints the table of the latest record
    python -m tools.support --write     # writes it to README.md

Tests with the marker `supports` are the source: tests/support/support_record.py.
"""

import argparse
import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from stepprune_jax.models.families import FAMILIES

ROOT = Path(__file__).resolve().parents[1]
README, RECORD = ROOT / "README.md", ROOT / "tests" / "support" / "recorded" / "support.json"
FEATURES = ("answer", "train", "serve", "video", "int8")
# A line of README.md, and the table below it up to an empty line.
_MARK = "<!-- The table of `python -m tools.support`; do not edit. -->"
_TABLE = re.compile(re.escape(_MARK) + r"\n(\|.*\n)*")

# By family, by feature: "status", "date" and "test".
Record = Mapping[str, Mapping[str, Mapping[str, str]]]


def format_table(record: Record) -> str:
    """Returns the support table in Markdown: a row for each family, a column for each feature.

    Args:
        record: the record of the tests.
    """
    rows = [("family", *FEATURES), ("---",) * (1 + len(FEATURES))]
    titles = {family.SUPPORTED.partition(" ")[0]: name for name, family in FAMILIES.items()}
    for title, name in sorted(titles.items()):
        cells = []
        for feature in FEATURES:
            entry = record.get(name, {}).get(feature)
            cells.append(f"*{entry['status']}* {entry['date']}" if entry else "not yet")
        rows.append((title, *cells))
    return "".join(f"| {' | '.join(row)} |\n" for row in rows)


def main(argv: Sequence[str] | None = None) -> None:
    """Prints the table, or writes it to README.md.

    Args:
        argv: command-line arguments; None reads the arguments of the process.
    """
    parser = argparse.ArgumentParser(description="Prints which model families can do what.")
    parser.add_argument("--write", action="store_true", help="write the table to README.md")
    flags = parser.parse_args(argv)
    table = format_table(json.loads(RECORD.read_text()))
    if flags.write:
        text, num_tables = _TABLE.subn(f"{_MARK}\n{table}", README.read_text(encoding="utf-8"))
        if num_tables != 1:
            raise SystemExit(f"{README} has {num_tables} lines {_MARK}, expected 1")
        README.write_text(text, encoding="utf-8")
    else:
        print(table, end="")


if __name__ == "__main__":
    main()
