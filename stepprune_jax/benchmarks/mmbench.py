"""MMBench and MMBench-CN: circular accuracy on the dev split, and the sheet for the server.

A question counts only if it is answered correctly in every rotation of its options; the rotations
are rows of the file. Liu et al., "MMBench: Is Your Multi-modal Model an All-around Player?"
(ECCV 2024).
"""

import base64
import csv
import io
import itertools
import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

from stepprune_jax.benchmarks import layout
from stepprune_jax.benchmarks.answers import GivenAnswer, latest, read_answers
from stepprune_jax.benchmarks.benchmark import Benchmark, Score, mean_percent, worth_by_id
from stepprune_jax.benchmarks.questions import OPTION_LETTER, BenchmarkQuestion
from stepprune_jax.data.json_files import JsonObject
from stepprune_jax.user_input import UserError

# The k-th rotation of question i has the index i + k * ROTATION.
ROTATION = 1_000_000
SERVER = "https://mmbench.opencompass.org.cn"
SOURCE = "https://download.openmmlab.com/mmclassification/datasets/mmbench/"

# LLaVA reads and writes the files with pandas, which treats these cells as empty.
_EMPTY = frozenset(
    [
        *("", "None", "NULL", "null", "NA", "N/A", "n/a", "#NA", "#N/A", "#N/A N/A", "<NA>"),
        *("NaN", "nan", "-NaN", "-nan", "1.#IND", "-1.#IND", "1.#QNAN", "-1.#QNAN"),
    ]
)
# Columns that a submission does not have.
_LEFT_OUT = frozenset(("hint", "category", "source", "image", "comment", "l2-category"))
_PREDICTION = 6
_ASKED = "ABCD"  # options shown by LLaVA's program

_BLANKED = str.maketrans(dict.fromkeys(".()[],:;!*#{}", " "))
_STATED = re.compile(r"answer\s+is\s+\**([A-D])", re.IGNORECASE)
_LAST_WORDS = 4


class Edition(NamedTuple):
    """An edition of the benchmark in one language.

    Attributes:
        name: name on the command line.
        folders: possible folders, the preferred one first.
        dev: name of the dev file.
        test: names of the test files, which only the server scores.
        size: number of rows and of questions of the published dev file; None if unknown.
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
    """Reads a tab-separated file of MMBench row by row; None where pandas finds an empty cell."""
    limit = csv.field_size_limit(2**31 - 1)  # an image is longer than the usual limit
    seen_indices = set()
    try:
        with path.open(encoding="utf-8-sig", newline="") as lines:
            reader = csv.reader(lines, dialect="excel-tab")
            names = next(reader, [])
            if missing := [name for name in ("index", "question", "A", "B") if name not in names]:
                raise UserError(f"{path}: line 1: expected a column {missing[0]}")
            for fields in filter(None, reader):  # pandas also skips blank lines
                cells = (None if field in _EMPTY else field for field in fields)
                row = dict(zip(names, cells, strict=False))
                index = row.get("index") or ""
                if len(fields) != len(names) or not index.isdecimal() or int(index) in seen_indices:
                    raise UserError(
                        f"{path}: line {reader.line_num}: expected {len(names)} fields and an "
                        "index that no other line has: was the file truncated?"
                    )
                seen_indices.add(int(index))
                yield row
    except (UnicodeDecodeError, csv.Error) as error:
        raise UserError(f"{path}: not a tab-separated file in UTF-8: {error}") from error
    finally:
        csv.field_size_limit(limit)


def read_list(path: Path, images: Path, instruction: str) -> Iterator[BenchmarkQuestion]:
    """Reads the questions of a file, rotations included, with the images in its rows.

    A number in the image column refers to the row with this index, as in VLMEvalKit. A question has
    its hint, if there is one, and its options up to the first empty option. The instruction asks
    for a letter; it is added to the message but not to the recorded prompt.
    """
    rows = list(read_rows(path))
    images_of = {str(int(row["index"])): row.get("image") or "" for row in rows}
    for row in rows:
        options = list(itertools.takewhile(_has_text, (row.get(letter) for letter in _ASKED)))
        cell = row.get("image") or ""
        cell = images_of.get(cell, "") if cell.isdecimal() else cell
        try:
            image = b"" if cell.isdecimal() else base64.b64decode(cell, validate=True)
        except ValueError:
            image = b""
        if not (image and _has_text(row["question"])):
            raise UserError(
                f"{path}: index {row['index']}: expected a question, and an image in base64 or the "
                "index of a row with one"
            )
        hint = row.get("hint")
        letters = list(_ASKED[: len(options)])
        named = [f"{letter}. {text}" for letter, text in zip(letters, options, strict=True)]
        prompt = "\n".join([*([hint] if _has_text(hint) else []), row["question"], *named])
        fields = {"round_id": 0, "options": options, "option_char": letters}
        yield BenchmarkQuestion(int(row["index"]), prompt + instruction, prompt, image, fields)


def _has_text(cell: str | None) -> bool:
    """Returns whether LLaVA's program treats a cell as non-empty; pandas' empty cells are None."""
    return cell is not None and cell.lower() not in ("nan", "none")


def _rows_by_index(path: Path) -> dict[str, TsvRow]:
    """Reads the rows of a file by index, without the images."""
    return {
        str(int(row["index"])): {name: text for name, text in row.items() if name != "image"}
        for row in read_rows(path)
    }


def options_of(row: TsvRow) -> dict[str, str]:
    """Returns the non-empty options of a row, by letter."""
    return {name: text for name, text in row.items() if re.fullmatch("[A-Z]", name) and text}


def option_letter(text: str, options: Mapping[str, str]) -> str | None:
    """Finds the chosen option as in VLMEvalKit's "exact matching", without a judge.

    Brackets and punctuation marks (except full-width marks) become blanks. The first rule that
    applies decides:

    1. Exactly one option letter occurs as a word, and it first occurs among the last four words:
       that letter.
    2. No option letter occurs as a word, but Z does: Z.
    3. The text says "answer is X", in any case, and X is an option: X.
    4. The text is at most twice as long as all options together, and it contains the text of
       exactly one option, in any case: the letter of that option.

    Otherwise returns None.
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

    A row without an answer is wrong. The headline is the circular accuracy in percent, with letters
    from `option_letter`. Parts: the same per `category` and `l2-category`; `letter_only`, where
    only an answer that is exactly the letter is correct; `one_round` and `one_round_letter_only`,
    without the rotations, which are not published; the number of `questions` and of `rows`.
    """
    table, warnings = _read_dev(root, edition), []
    kept = latest(_one_round(answers), table, warnings, f"; {_submit(edition)}")
    rotations = defaultdict(list)
    for name in sorted(table, key=int):
        rotations[int(name) % ROTATION].append(name)
    texts = {name: answer.text for name, answer in kept.items()}
    is_correct = {name: _is_right(text, table[name]) for name, text in texts.items()}
    is_exact_letter = {name: text == table[name]["answer"] for name, text in texts.items()}

    def all_rounds(grades: Mapping[str, bool]) -> list[bool]:
        return [all(grades.get(name, False) for name in names) for names in rotations.values()]

    def first_round(grades: Mapping[str, bool]) -> list[bool]:
        return [grades.get(names[0], False) for names in rotations.values()]

    parts: JsonObject = {}
    for column in ("category", "l2-category"):
        grades_by_kind = defaultdict(list)
        for names, grade in zip(rotations.values(), all_rounds(is_correct), strict=True):
            grades_by_kind[table[names[0]].get(column)].append(grade)
        grades_by_kind.pop(None, None)
        parts[column] = {
            kind: mean_percent(grades) for kind, grades in sorted(grades_by_kind.items())
        }
    parts |= {
        "letter_only": mean_percent(all_rounds(is_exact_letter)),
        "one_round": mean_percent(first_round(is_correct)),
        "one_round_letter_only": mean_percent(first_round(is_exact_letter)),
        "questions": len(rotations),
        "rows": len(table),
    }
    if edition.size is not None:
        rows, questions = edition.size
        warnings += layout.size_warnings(f"{edition.dev}, rows", len(table), rows)
        warnings += layout.size_warnings(f"{edition.dev}, questions", len(rotations), questions)
    return Score(mean_percent(all_rounds(is_correct)), parts, warnings)


def _is_right(text: str, row: TsvRow) -> bool:
    """Returns whether the chosen option is correct."""
    return option_letter(text, options_of(row)) == row["answer"]


def _worth(root: Path, edition: Edition) -> Callable[[GivenAnswer], float | None]:
    """Grades an answer to one row; see `Benchmark.worth`."""
    return worth_by_id(_read_dev(root, edition), _is_right)


def _submit(edition: Edition) -> str:
    """Returns how to have the test split scored."""
    return (
        "the test split is scored by the server only: write a submission with "
        f"`stepprune-convert {edition.name}` and upload it at {SERVER}"
    )


def _read_dev(root: str | Path, edition: Edition) -> dict[str, TsvRow]:
    """Reads the rows of the dev file with their answers, without the images."""
    path = _find(root, edition, edition.dev)[0]
    table = _rows_by_index(path)
    if unknown := next((i for i, row in table.items() if row.get("answer") is None), None):
        raise UserError(
            f"{path}: index {unknown}: no letter in a column answer; {_submit(edition)}"
        )
    return table


def _one_round(answers: str | Path) -> list[GivenAnswer]:
    """Reads answers; rejects answers to LLaVA's rotations, whose letters mean other options."""
    rows = read_answers(answers)
    for row in rows:
        if row.fields.get("round_id", 0) != 0:
            raise UserError(
                f"{row.where}: expected round_id 0, got {row.fields['round_id']!r}: the file was "
                "written with --all-rounds, which is not used here (the rotations are rows of the "
                "question file)"
            )
    return rows


def _find(root: str | Path, edition: Edition, *names: str) -> list[Path]:
    """Returns the existing files among `names`; raises a FileNotFoundError if there are none."""
    paths = []
    for name in names:
        places = (Path(root) / folder / name for folder in edition.folders)
        paths += [place for place in places if place.is_file()][:1]
    if not paths:
        raise FileNotFoundError(
            f"no {' or '.join(names)} in {root}: get it from {SOURCE}; {_submit(edition)}"
        )
    return paths


def convert(
    root: str | Path, answers: str | Path, out: str | Path, *, edition: Edition = ENGLISH
) -> list[str]:
    """Writes the sheet for the server.

    Fills in the dev or test file that contains the largest number of answered rows. Every row gets
    its last answer, or an empty cell without an answer. The prediction is the seventh column. The
    columns hint, category, l2-category, source, image and comment are left out.
    """
    rows, warnings = _one_round(answers), []
    answered_ids = {row.id for row in rows}
    tables = map(_rows_by_index, _find(root, edition, edition.dev, *edition.test))
    table = max(tables, key=lambda table: len(answered_ids & table.keys()))
    kept = latest(rows, table, warnings)
    columns = [column for column in next(iter(table.values())) if column not in _LEFT_OUT]
    before, after = columns[:_PREDICTION], columns[_PREDICTION:]
    sheet = [[*before, "prediction", *after]]
    for name, row in table.items():
        text = kept[name].text if name in kept else None
        cells = {**row, "index": int(name)}
        sheet.append([*(cells[c] for c in before), text, *(cells[c] for c in after)])
    layout.write_submission(out, xlsx(sheet))
    return warnings


# Characters that XML 1.0 cannot hold. openpyxl rejects only the control characters.
_NOT_XML = re.compile("[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")


def xlsx(rows: Iterable[Sequence[str | int | None]]) -> bytes:
    """Writes a workbook whose only sheet has these rows.

    Characters that XML cannot hold are dropped, and a text is truncated to the 32,767 characters of
    a cell. Readers treat each line end as a newline, as in the sheets of LLaVA's program.
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
