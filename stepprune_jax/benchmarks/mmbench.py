"""MMBench and MMBench-CN: circular accuracy on the dev split, and the sheet for the server.

A question counts only if it is answered correctly in every rotation of its options; the rotations
are rows of the file. Liu et al., "MMBench: Is Your Multi-modal Model an All-around Player?"
(ECCV 2024).
"""

import base64
import binascii
import csv
import io
import itertools
import re
import warnings as notes
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

from stepprune_jax.benchmarks import layout
from stepprune_jax.benchmarks.answers import Answer, latest, read_answers
from stepprune_jax.benchmarks.benchmark import Benchmark, Score, mean_percent, worth_by_id
from stepprune_jax.benchmarks.questions import OPTION_LETTER, BenchmarkQuestion

# The k-th rotation of question i has the index i + k * ROTATION.
ROTATION = 1_000_000
SERVER = "https://mmbench.opencompass.org.cn"
SOURCE = "https://download.openmmlab.com/mmclassification/datasets/mmbench/"

# Cells that pandas, which LLaVA uses to read and write the files, treats as empty.
_EMPTY = frozenset(
    [
        *("", "None", "NULL", "null", "NA", "N/A", "n/a", "#NA", "#N/A", "#N/A N/A", "<NA>"),
        *("NaN", "nan", "-NaN", "-nan", "1.#IND", "-1.#IND", "1.#QNAN", "-1.#QNAN"),
    ]
)
# Not part of a submission, which has the prediction as its seventh column.
_LEFT_OUT = frozenset(("hint", "category", "source", "image", "comment", "l2-category"))
_PREDICTION = 6
_ASKED = "ABCD"  # options shown by LLaVA's program

_BLANKED = str.maketrans(dict.fromkeys(".()[],:;!*#{}", " "))
_STATED = re.compile(r"answer\s+is\s+\**([A-D])", re.IGNORECASE)
_LAST_WORDS = 4


class Edition(NamedTuple):
    """One language of the benchmark.

    Attributes:
        name: name of the benchmark.
        folders: possible folders of the files, the preferred one first.
        dev: file with answers.
        test: files without answers, which only the server scores.
        size: rows and questions of the published dev file, if known.
    """

    name: str
    folders: tuple[str, ...]
    dev: str
    test: tuple[str, ...]
    size: tuple[int, int] | None


ENGLISH = Edition(
    "mmbench",
    ("mmbench",),
    "mmbench_dev_20230712.tsv",
    ("mmbench_test_20230712.tsv", "mmbench_test_en_20231003.tsv"),
    (4377, 1176),
)
# LLaVA's documentation puts the file in mmbench/, its script reads it from mmbench_cn/.
CHINESE = Edition(
    "mmbench_cn",
    ("mmbench_cn", "mmbench"),
    "mmbench_dev_cn_20231003.tsv",
    ("mmbench_test_cn_20231003.tsv",),
    None,
)

TsvRow = Mapping[str, str | None]


def read_rows(path: Path) -> Iterator[TsvRow]:
    """Reads a file of MMBench row by row.

    Args:
        path: tab-separated, with the names of the columns first; quoted fields may have newlines.

    Yields:
        Each row by column; None where pandas finds an empty cell.

    Raises:
        ValueError: it is malformed; or a row, whose last line is named, has too few or too many
            fields or no integer as index.
    """
    limit = csv.field_size_limit(2**31 - 1)  # an image is longer than the usual limit
    try:
        with path.open(encoding="utf-8-sig", newline="") as lines:
            reader = csv.reader(lines, dialect="excel-tab")
            names = next(reader, [])
            if missing := [name for name in ("index", "question", "A", "B") if name not in names]:
                raise ValueError(f"{path}: line 1: expected a column {missing[0]}")
            for fields in filter(None, reader):  # pandas skips blank lines, too
                where = f"{path}: line {reader.line_num}"
                if len(fields) != len(names):
                    raise ValueError(
                        f"{where}: expected {len(names)} fields, got {len(fields)}: was the file "
                        "truncated?"
                    )
                row = dict(zip(names, (None if f in _EMPTY else f for f in fields), strict=True))
                if not (row["index"] or "").isdecimal():
                    raise ValueError(f"{where}: expected a number as index, got {row['index']!r}")
                yield row
    except (UnicodeDecodeError, csv.Error) as error:
        raise ValueError(f"{path}: not a tab-separated file in UTF-8: {error}") from error
    finally:
        csv.field_size_limit(limit)


def read_list(path: Path, images: Path, instruction: str) -> Iterator[BenchmarkQuestion]:
    """Reads the questions of a file, rotations included.

    Args:
        path: as for `read_rows`; images are in its rows.
        images: not read.
        instruction: the request for a letter, added to the message but not to the recorded prompt.

    Yields:
        The rows as questions, each with its hint, if it has one, and its options up to the first
        that is empty.

    Raises:
        ValueError: as `read_rows`; or a row lacks its question or its image.
    """
    for row in read_rows(path):
        where = f"{path}: index {row['index']}"
        options = list(itertools.takewhile(_has_text, (row.get(letter) for letter in _ASKED)))
        if not _has_text(row["question"]):
            raise ValueError(f"{where}: the question is empty")
        hint = row.get("hint")
        letters = list(_ASKED[: len(options)])
        named = [f"{letter}. {text}" for letter, text in zip(letters, options, strict=True)]
        prompt = "\n".join([*([hint] if _has_text(hint) else []), row["question"], *named])
        try:
            image = base64.b64decode(row.get("image") or "", validate=True)
        except binascii.Error as error:
            raise ValueError(f"{where}: the image is not base64: {error}") from error
        if not image:
            raise ValueError(f"{where}: no image")
        fields = {"round_id": 0, "options": options, "option_char": letters}
        yield BenchmarkQuestion(int(row["index"]), prompt + instruction, prompt, image, fields)


def _has_text(cell: str | None) -> bool:
    """Returns whether LLaVA's program treats a cell as non-empty; pandas' empty cells are None."""
    return cell is not None and cell.lower() not in ("nan", "none")


def _rows_by_index(path: Path) -> dict[str, TsvRow]:
    """Reads the rows of a file by index, without the images."""
    table = {}
    for row in read_rows(path):
        name = str(int(row["index"]))
        if name in table:
            raise ValueError(f"{path}: index {name} occurs twice")
        table[name] = {column: text for column, text in row.items() if column != "image"}
    if not table:
        raise ValueError(f"{path}: expected at least one row")
    return table


def options_of(row: TsvRow) -> dict[str, str]:
    """Returns the non-empty options of a row, by letter."""
    return {name: text for name, text in row.items() if re.fullmatch("[A-Z]", name) and text}


def option_letter(text: str, options: Mapping[str, str]) -> str | None:
    """Finds the chosen option as in VLMEvalKit's "exact matching", without a judge.

    Brackets and marks (not the full-width ones) become blanks. The first that applies:

    1. one option letter alone occurs as a word, and first among the last four words: that letter;
    2. none does, but a lone Z: Z;
    3. "answer is X" in any case with a letter that is an option;
    4. the text is not longer than twice all options together, and the text of one option alone
       occurs in it, in any case.

    Args:
        text: the answer.
        options: the option texts by letter.

    Returns:
        The letter, or None.
    """
    words = text.translate(_BLANKED).split()
    named = [letter for letter in options if letter in words]
    if len(named) == 1 and words.index(named[0]) >= len(words) - _LAST_WORDS:
        return named[0]
    if not named and "Z" in words:
        return "Z"
    stated = _STATED.search(text)
    if stated and stated[1].upper() in options:
        return stated[1].upper()
    lowered = text.lower()
    if len(lowered) > 2 * sum(len(option) for option in options.values()):
        return None
    held = [letter for letter, option in options.items() if option.lower() in lowered]
    return held[0] if len(held) == 1 else None


def score(root: str | Path, answers: str | Path, *, edition: Edition = ENGLISH) -> Score:
    """Scores answers to the dev split by circular accuracy.

    Rows without an answer are wrong.

    Args:
        root: LLaVA's evaluation folder; the dev file of `edition` is read.
        answers: answer file.
        edition: the language.

    Returns:
        The headline is the circular accuracy in percent with letters found as `option_letter`
        does. Parts: the same per `category` and `l2-category`; `letter_only`, where nothing but
        the bare letter is right; `one_round` and `one_round_letter_only`, which leave the
        rotations out and are not what is published; the number of `questions` and of `rows`.

    Raises:
        FileNotFoundError: a file is missing.
        ValueError: a malformed file, or answers to another file.
    """
    name, table = edition.dev, _read_dev(root, edition)
    rows = _one_round(answers)
    if all(row.id not in table for row in rows):
        raise ValueError(f"{answers}: no answer is to a question of {name}; {_submit(edition)}")
    warnings: list[str] = []
    kept = latest(rows, table, warnings)
    questions = _questions(table, kept)
    parts = {kind: _per_kind(questions, kind) for kind in ("category", "l2-category")}
    parts |= {
        "letter_only": mean_percent(all(r.letter_only for r in q.rotations) for q in questions),
        "one_round": mean_percent(q.rotations[0].matched for q in questions),
        "one_round_letter_only": mean_percent(q.rotations[0].letter_only for q in questions),
        "questions": len(questions),
        "rows": len(table),
    }
    if edition.size is not None:
        warnings += layout.size_warnings(f"{name}, rows", len(table), edition.size[0])
        warnings += layout.size_warnings(f"{name}, questions", len(questions), edition.size[1])
    return Score(mean_percent(q.right for q in questions), parts, warnings)


def _worth(root: Path, edition: Edition) -> Callable[[Answer], float | None]:
    """Grades an answer to one row; see `Benchmark.worth`."""
    table = _read_dev(root, edition)
    return worth_by_id(
        table, lambda text, row: option_letter(text, options_of(row)) == row["answer"]
    )


def _submit(edition: Edition) -> str:
    """Returns how to have the test split scored."""
    return (
        f"the test split is scored by the server only: write a submission with `python -m "
        f"stepprune_jax.benchmarks.convert {edition.name}` and upload it at {SERVER}"
    )


def _read_dev(root: str | Path, edition: Edition) -> dict[str, TsvRow]:
    """Reads the rows of the dev file with their answers, without the images."""
    path = _find(root, edition).get(edition.dev)
    if path is None:
        raise FileNotFoundError(
            f"no {edition.dev} in {root}: get it from {SOURCE}; {_submit(edition)}"
        )
    table = _rows_by_index(path)
    if unknown := next((i for i, row in table.items() if row.get("answer") is None), None):
        raise ValueError(
            f"{path}: index {unknown}: no letter in a column answer; {_submit(edition)}"
        )
    return table


class _Outcome(NamedTuple):
    """Whether the answer to a row is right, for each way of finding the letter."""

    matched: bool
    letter_only: bool


class _Question(NamedTuple):
    """A question: its first row and the outcomes of all its rows, the first one first."""

    row: TsvRow
    rotations: list[_Outcome]

    @property
    def right(self) -> bool:
        """Returns whether every rotation was answered correctly."""
        return all(outcome.matched for outcome in self.rotations)


def _questions(table: Mapping[str, TsvRow], kept: Mapping[str, Answer]) -> list[_Question]:
    """Groups the rows of a file by question and grades the answers."""
    questions: dict[int, _Question] = {}
    for name in sorted(table, key=int):
        row = table[name]
        question = questions.setdefault(int(name) % ROTATION, _Question(row, []))
        text = kept[name].text if name in kept else None
        question.rotations.append(
            _Outcome(
                text is not None and option_letter(text, options_of(row)) == row["answer"],
                text is not None and text == row["answer"],
            )
        )
    return list(questions.values())


def _per_kind(questions: Sequence[_Question], column: str) -> dict[str, float]:
    """Computes circular accuracy per value of a column."""
    kinds = defaultdict(list)
    for question in questions:
        kinds[question.row.get(column)].append(question.right)
    return {
        kind: mean_percent(rights) for kind, rights in sorted(kinds.items()) if kind is not None
    }


def _one_round(answers: str | Path) -> list[Answer]:
    """Reads answers and rejects those of LLaVA's rotations, whose letters differ in meaning."""
    rows = read_answers(answers)
    for row in rows:
        if row.fields.get("round_id", 0) != 0:
            raise ValueError(
                f"{row.where}: expected round_id 0, got {row.fields['round_id']!r}: the file was "
                "written with --all-rounds, which is not used here (the rotations are rows of the "
                "question file)"
            )
    return rows


def _find(root: str | Path, edition: Edition) -> dict[str, Path]:
    """Finds the existing files of an edition, by name."""
    layout.folder(root, *edition.folders)
    paths = {}
    for name in (edition.dev, *edition.test):
        for folder in edition.folders:
            if (Path(root) / folder / name).is_file():
                paths.setdefault(name, Path(root) / folder / name)
    return paths


def convert(
    root: str | Path, answers: str | Path, out: str | Path, *, edition: Edition = ENGLISH
) -> Path:
    """Writes the sheet for the server.

    The existing dev or test file that contains most of the answered rows is filled in: every row of
    it, with the last of several answers, and an empty cell if there is none.

    Args:
        root: LLaVA's evaluation folder.
        answers: answer file.
        out: file to write; mmbench/answers_upload/SPLIT/MODEL.xlsx in LLaVA's layout.
        edition: the language.

    Returns:
        `out`: the columns of the file without hint, category, l2-category, source, image and
        comment, with the prediction as the seventh.

    Raises:
        FileNotFoundError: a file is missing.
        ValueError: a malformed file, or answers to none of them.
    """
    paths = _find(root, edition)
    if not paths:
        names = ", ".join((edition.dev, *edition.test))
        raise FileNotFoundError(f"none of {names} in {root}: get one from {SOURCE}")
    rows = _one_round(answers)
    asked = {row.id for row in rows}
    tables = [_rows_by_index(path) for path in paths.values()]
    table = max(tables, key=lambda table: len(asked & table.keys()))
    if asked.isdisjoint(table):
        raise ValueError(f"{answers}: no answer is to a question of {', '.join(paths)}")
    messages: list[str] = []
    kept = latest(rows, table, messages)
    for message in messages:
        notes.warn(message, stacklevel=2)
    columns = [column for column in next(iter(table.values())) if column not in _LEFT_OUT]
    before, after = columns[:_PREDICTION], columns[_PREDICTION:]
    sheet = [[*before, "prediction", *after]]
    for name, row in table.items():
        text = kept[name].text if name in kept else None
        cells = {**row, "index": int(name)}
        sheet.append([*(cells[c] for c in before), text, *(cells[c] for c in after)])
    return layout.write_submission(out, xlsx(sheet))


# Characters that XML 1.0 cannot hold. openpyxl rejects only the control characters.
_NOT_XML = re.compile("[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")


def xlsx(rows: Iterable[Sequence[str | int | None]]) -> bytes:
    """Writes a workbook whose only sheet has these rows.

    Characters that XML cannot hold are dropped, and a text is truncated to the 32,767 characters of
    a cell. Readers treat each line end as a newline, as in the sheets of LLaVA's program.

    Args:
        rows: the cells of each row, the names of the columns first. None is an empty cell.

    Returns:
        The content of an .xlsx file.
    """
    # Imported here: only a submission needs it.
    from openpyxl import Workbook
    from openpyxl.cell import WriteOnlyCell

    book = Workbook(write_only=True)
    sheet = book.create_sheet("Sheet1")

    for row in rows:
        texts = [_NOT_XML.sub("", cell) if isinstance(cell, str) else cell for cell in row]
        cells = [WriteOnlyCell(sheet, text) for text in texts]
        for cell in cells:
            if cell.data_type in "fe":  # "=1+1" and "#N/A" are texts, not a formula and an error
                cell.data_type = "s"
        sheet.append(cells)
    content = io.BytesIO()
    book.save(content)
    return content.getvalue()


def _benchmark(edition: Edition, title: str, instruction: str) -> Benchmark:
    """Describes the benchmark in one language."""
    return Benchmark(
        name=edition.name,
        title=title,
        headline="circular accuracy in percent, dev",
        question_files=tuple(f"{folder}/{edition.dev}" for folder in edition.folders),
        question_source=SOURCE,
        read=partial(read_list, instruction=instruction),
        max_new_tokens=1024,
        score=partial(score, edition=edition),
        worth=partial(_worth, edition=edition),
        convert=partial(convert, edition=edition),
        submission_suffix=".xlsx",
    )


BENCHMARK = _benchmark(ENGLISH, "MMBench", OPTION_LETTER)
BENCHMARK_CN = _benchmark(CHINESE, "MMBench-CN", "\n请直接回答选项字母。")
