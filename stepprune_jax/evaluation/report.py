"""The report folder of an evaluation: creating, describing and reading it."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Int

from stepprune_jax.data.json_files import read_json_list, read_json_object, write_json
from stepprune_jax.data.llava import Question, Scene
from stepprune_jax.evaluation.accuracy import full_row
from stepprune_jax.evaluation.records import RECORDS, Records, load_records
from stepprune_jax.evaluation.split import read_split

MANIFEST = "report.json"
_KIND = "stepprune_report"


class Report(NamedTuple):
    """An evaluation of every method on q questions.

    Attributes:
        table: objects of table.json, one per row.
        records: one per row of the table.
        questions: the questions, in the order of the records.
        answers: the correct answers.
        scenes: descriptions of the images, or None.
        grids: rows and columns of the patches of each question's image.
        metrics_file: metrics of the training run, or None.
        model: name of the model; empty if unknown.
        ask: a command that asks the policy a question; empty if there is none.
    """

    table: list[dict[str, Any]]
    records: list[Records]
    questions: list[Question]
    answers: list[str]
    scenes: list[Scene] | None
    grids: list[tuple[int, int]]
    metrics_file: Path | None = None
    model: str = ""
    ask: str = ""

    @property
    def sizes(self) -> Int[np.ndarray, "q"]:
        """Visual tokens of each question's image."""
        return full_row(self.records).count

    @property
    def num_tokens(self) -> int:
        """N, the number of visual tokens of an image; the mean if images differ."""
        return round(float(self.sizes.mean()))

    def first(self, i: int) -> int:
        """Returns the index of the first patch: 1 if the class token is kept, otherwise 0."""
        rows, columns = self.grids[i]
        return int(self.sizes[i]) - rows * columns

    def side(self, i: int) -> int:
        """Returns the patches along an edge of an image that is padded to a square."""
        return max(self.grids[i])

    def patches(self, record: Records, i: int) -> Int[np.ndarray, "k"]:
        """Returns the patches of that square kept for question i, in order of choice."""
        return square_patches(record.order[i, : record.count[i]], self.grids[i], self.first(i))


def square_patches(
    tokens: Sequence[int] | Int[np.ndarray, "t"], grid: tuple[int, int], first: int
) -> Int[np.ndarray, "k"]:
    """Finds the patches of tokens in the square that their image is padded to.

    Args:
        tokens: indices of visual tokens.
        grid: rows and columns of the image's patches.
        first: index of the first patch; tokens before it (a class token, and -1 for merged ones)
            have no patch and are left out.

    Returns:
        Indices in a square of max(rows, columns) patches along an edge, with the image in its
        middle.
    """
    (rows, columns), side = grid, max(grid)
    place = np.asarray(tokens, int) - first
    row, column = np.divmod(place[place >= 0], columns)
    return ((side - rows) // 2 + row) * side + (side - columns) // 2 + column


def open_folder(folder: str | Path) -> Path:
    """Creates the folder of a report, or verifies that it already holds one.

    Args:
        folder: the folder.

    Returns:
        The folder.

    Raises:
        ValueError: it is a file, or holds files but no report.
    """
    folder = Path(folder)
    if folder.exists() and not folder.is_dir():
        raise ValueError(f"{folder} is a file, expected a folder for the report")
    if folder.is_dir() and any(folder.iterdir()):
        try:
            ours = read_json_object(folder / MANIFEST).get("kind") == _KIND
        except (OSError, ValueError):
            ours = False
        if not ours:
            some = ", ".join(sorted(path.name for path in folder.iterdir())[:3])
            raise ValueError(
                f"{folder} holds files that are not a report's ({some}); move them away, or give "
                "another --workdir"
            )
    folder.mkdir(parents=True, exist_ok=True)
    if not (folder / MANIFEST).is_file():
        # Written first, so that the next run may reuse the folder of an interrupted one.
        write_manifest(folder, {})
    return folder


def write_manifest(folder: Path, facts: dict[str, Any]) -> None:
    """Marks the folder as a report, and describes what was evaluated."""
    write_json(folder / MANIFEST, {"kind": _KIND} | facts)


def read_report(folder: str | Path) -> Report:
    """Reads a saved report and its questions, to redraw it.

    Args:
        folder: folder written by `evaluate`.

    Returns:
        The report.

    Raises:
        FileNotFoundError: the folder, its tables or its data do not exist.
        ValueError: files that do not belong together.
    """
    folder = Path(folder)
    for name in (MANIFEST, "table.json"):
        if not (folder / name).is_file():
            raise FileNotFoundError(f"no file {folder / name}; run eval.py first")
    facts = read_json_object(folder / MANIFEST)
    if facts.get("kind") != _KIND or "data" not in facts:
        raise ValueError(f"{folder / MANIFEST} does not belong to a finished report")
    split = read_split(_beside(folder, facts["data"]), "test")
    records = load_records(folder / RECORDS)
    table = read_json_list(folder / "table.json", "row")
    if len(table) != len(records):
        raise ValueError(f"{folder} has {len(table)} table rows, but {len(records)} records")
    for row in records:
        if len(row.count) != len(split.questions):
            raise ValueError(
                f"the records of {row.method!r} have {len(row.count)} questions, the test split "
                f"in {facts['data']} has {len(split.questions)}"
            )
    metrics, grids = facts.get("metrics_file"), facts.get("grids", {})
    known = [grids.get(question.image.name, facts.get("grid")) for question in split.questions]
    if not all(known):
        raise ValueError(f"{folder / MANIFEST} does not say the grids of all images")
    return Report(
        table=table,
        records=records,
        questions=split.questions,
        answers=split.answers,
        scenes=split.scenes,
        grids=[tuple(grid) for grid in known],
        metrics_file=_beside(folder, metrics) if metrics else None,
        model=facts.get("model_name") or Path(facts.get("model", "")).name,
        ask=facts.get("ask") or "",
    )


def relative(path: Path, folder: Path) -> str:
    """Returns a path relative to the run's working directory if inside, for the manifest.

    The whole directory can then be moved.
    """
    root = folder.resolve().parent
    resolved = path.resolve()
    return str(resolved.relative_to(root)) if resolved.is_relative_to(root) else str(resolved)


def _beside(folder: Path, path: str) -> Path:
    return folder.resolve().parent / path
