"""MMBench and MMBench-CN: circular accuracy on the dev split, and submissions to the server.

A question is correct only if it is answered correctly in every rotation of its options. The
rotations are rows of the question file. Liu et al., "MMBench: Is Your Multi-modal Model an
All-around Player?" (ECCV 2024).
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
from typing import NamedTuple, TypeGuard

from stepprune_jax.benchmarks import layout
from stepprune_jax.benchmarks.answers import GivenAnswer, latest_answers, read_answers
from stepprune_jax.benchmarks.benchmark import Benchmark, Score, grade_by_id
from stepprune_jax.benchmarks.percent import mean_percent, percent_by_group
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
# Columns of the question file that a submission omits.
_OMITTED_COLUMNS = frozenset(("hint", "category", "source", "image", "comment", "l2-category"))
# Position of the column "prediction" in LLaVA's submission.
_PREDICTION_COLUMN = 6
# Letters of the options that LLaVA's program shows.
_SHOWN_LETTERS = "ABCD"

# Rules of VLMEvalKit's "exact matching", see `option_letter`.
_MARKS_TO_BLANKS = str.maketrans(dict.fromkeys(".()[],:;!*#{}", " "))
_ANSWER_IS = re.compile(r"answer\s+is\s+\**([A-D])", re.IGNORECASE)
_NUM_LAST_WORDS = 4


class Edition(NamedTuple):
    """An edition of the benchmark in one language.

    Attributes:
        name: name on the command line.
        folders: possible folders. The first one with the file is used.
        dev: name of the dev file.
        test: names of the test files, which only the server scores.
        size: numbers of rows and questions of the published dev file; None if unknown.
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


def read_rows(path: Path) -> Iterator[tuple[int, TsvRow]]:
    """Reads a tab-separated file of MMBench row by row.

    Args:
        path: the file.

    Yields:
        Pairs (index, row). The row has the text of each cell by column; None for a cell that pandas
        treats as empty.

    Raises:
        UserError: the file is not tab-separated text in UTF-8, lacks a column, or has a row with a
            repeated index or another number of cells than columns.
    """
    # The limit is global, so it is restored at the end. The cell of an image exceeds the default.
    default_limit = csv.field_size_limit(2**31 - 1)
    seen_indices = set()
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            reader = csv.reader(file, dialect="excel-tab")
            columns = next(reader, [])
            required_columns = ("index", "question", "A", "B")
            if missing := [name for name in required_columns if name not in columns]:
                raise UserError(f"{path}: line 1: expected a column {missing[0]}")
            for cells in filter(None, reader):  # pandas also skips blank lines
                values = (None if cell in _EMPTY else cell for cell in cells)
                row = dict(zip(columns, values, strict=False))
                index_cell = row.get("index") or ""
                index = int(index_cell) if index_cell.isdecimal() else None
                if len(cells) != len(columns) or index is None or index in seen_indices:
                    raise UserError(
                        f"{path}: line {reader.line_num}: expected {len(columns)} fields and an "
                        "index that no other line has: was the file truncated?"
                    )
                seen_indices.add(index)
                yield index, row
    except (UnicodeDecodeError, csv.Error) as error:
        raise UserError(f"{path}: not a tab-separated file in UTF-8: {error}") from error
    finally:
        csv.field_size_limit(default_limit)


def read_list(path: Path, images: Path, instruction: str) -> Iterator[BenchmarkQuestion]:
    """Reads the questions of a file, including their rotations and images.

    The message to the model consists of the hint, the question, the options up to the first empty
    one, and `instruction`.

    Args:
        path: the file.
        images: not used, because the file contains the images.
        instruction: request for a letter. The stored prompt does not contain it.

    Yields:
        One question for each row of the file.

    Raises:
        UserError: a row has no question or no image.
    """
    rows = list(read_rows(path))
    image_cells = {str(index): row.get("image") or "" for index, row in rows}
    for index, row in rows:
        option_cells = (row.get(letter) for letter in _SHOWN_LETTERS)
        # The first empty option is the end of the list.
        options = [str(cell) for cell in itertools.takewhile(_has_text, option_cells)]
        image = _decode_image(row.get("image") or "", image_cells)
        question = row["question"]
        if not image or not _has_text(question):
            raise UserError(
                f"{path}: index {index}: expected a question, and an image in base64 or the "
                "index of a row with one"
            )
        hint = row.get("hint")
        hint_lines = [hint] if _has_text(hint) else []
        letters = list(_SHOWN_LETTERS[: len(options)])
        option_lines = [f"{letter}. {text}" for letter, text in zip(letters, options, strict=True)]
        prompt = "\n".join([*hint_lines, question, *option_lines])
        fields = {"round_id": 0, "options": options, "option_char": letters}
        yield BenchmarkQuestion(index, prompt + instruction, prompt, image, fields)


def _decode_image(cell: str, image_cells: Mapping[str, str]) -> bytes:
    """Returns the image file of a row.

    Args:
        cell: image in base64, or the index of a row with this image, as in VLMEvalKit.
        image_cells: such cells by row index.

    Returns:
        The bytes of the file; empty if the cell contains neither of these.
    """
    if cell.isdecimal():
        cell = image_cells.get(cell, "")
        if cell.isdecimal():  # a reference to a row with another reference
            return b""
    try:
        return base64.b64decode(cell, validate=True)
    except ValueError:
        return b""


def _has_text(cell: str | None) -> TypeGuard[str]:
    """Returns whether LLaVA's program treats a cell as text. Empty cells of pandas are None."""
    return cell is not None and cell.lower() not in ("nan", "none")


def _rows_by_index(path: Path) -> dict[str, TsvRow]:
    """Reads the rows of a file by index, and drops the images to save memory."""
    return {
        str(index): {name: text for name, text in row.items() if name != "image"}
        for index, row in read_rows(path)
    }


def options_of(row: TsvRow) -> dict[str, str]:
    """Returns the non-empty options of a row by letter."""
    return {name: text for name, text in row.items() if re.fullmatch("[A-Z]", name) and text}


def option_letter(text: str, options: Mapping[str, str]) -> str | None:
    """Finds the chosen option as in VLMEvalKit's "exact matching", without a judge model.

    Punctuation marks (except full-width marks) and brackets are replaced by blanks, and the text is
    split into words. The first rule that applies decides:

    1. Exactly one option letter is among the words, and its first occurrence is one of the last
       four words. The result is this letter.
    2. No option letter is among the words, but Z is. The result is Z.
    3. The text contains "answer is X" in any case, and X is an option letter. The result is X.
    4. The text is at most twice as long as the texts of all options together, and contains the text
       of exactly one option in any case. The result is the letter of this option.

    Args:
        text: the answer.
        options: text of each option by letter.

    Returns:
        The letter, or None if no rule applies.
    """
    words = text.translate(_MARKS_TO_BLANKS).split()
    letters = [letter for letter in options if letter in words]
    if len(letters) == 1 and words.index(letters[0]) >= len(words) - _NUM_LAST_WORDS:
        return letters[0]
    if not letters and "Z" in words:
        return "Z"
    match = _ANSWER_IS.search(text)
    if match and match[1].upper() in options:
        return match[1].upper()
    lower_text = text.lower()
    if len(lower_text) > 2 * sum(len(option) for option in options.values()):
        return None
    matching_letters = [
        letter for letter, option in options.items() if option.lower() in lower_text
    ]
    return matching_letters[0] if len(matching_letters) == 1 else None


def score(root: str | Path, answers: str | Path, *, edition: Edition = ENGLISH) -> Score:
    """Scores answers to the dev split by circular accuracy.

    A question counts as correct if all rows with rotations of its options are answered correctly.

    Args:
        root: folder of LLaVA's layout.
        answers: the answer file.
        edition: the edition.

    Returns:
        The headline is the circular accuracy in percent, with letters from `option_letter`. A row
        without an answer is wrong. Parts: the circular accuracy per `category` and `l2-category`;
        `letter_only`, which accepts only an answer that is exactly the letter; `one_round` and
        `one_round_letter_only`, which ignore rotations and are not published; and the numbers of
        `questions` and `rows`.
    """
    rows, warnings = _read_dev(root, edition), []
    answer_of = latest_answers(_read_first_round(answers), rows, warnings, f"; {_advise(edition)}")
    rotations = _group_rotations(rows)
    texts = {index: answer.text for index, answer in answer_of.items()}
    is_correct = {index: _is_correct(text, rows[index]) for index, text in texts.items()}
    is_exact_letter = {index: text == rows[index]["answer"] for index, text in texts.items()}

    def grade_rotations(is_right: Mapping[str, bool]) -> list[bool]:
        return [all(is_right.get(index, False) for index in indices) for indices in rotations]

    def grade_first_rows(is_right: Mapping[str, bool]) -> list[bool]:
        return [is_right.get(indices[0], False) for indices in rotations]

    circular_grades = grade_rotations(is_correct)
    parts: JsonObject = {}
    for column in ("category", "l2-category"):
        categories = [rows[indices[0]].get(column) for indices in rotations]
        grades = zip(categories, circular_grades, strict=True)
        parts[column] = percent_by_group(
            (name, grade) for name, grade in grades if name is not None
        )
    parts |= {
        "letter_only": mean_percent(grade_rotations(is_exact_letter)),
        "one_round": mean_percent(grade_first_rows(is_correct)),
        "one_round_letter_only": mean_percent(grade_first_rows(is_exact_letter)),
        "questions": len(rotations),
        "rows": len(rows),
    }
    if edition.size is not None:
        num_rows, num_questions = edition.size
        warnings += layout.size_warnings(f"{edition.dev}, rows", len(rows), num_rows)
        warnings += layout.size_warnings(f"{edition.dev}, questions", len(rotations), num_questions)
    return Score(mean_percent(circular_grades), parts, warnings)


def _group_rotations(indices: Iterable[str]) -> list[list[str]]:
    """Groups the indices of rows by question, each group in ascending order."""
    indices_of_question = defaultdict(list)
    for index in sorted(indices, key=int):
        indices_of_question[int(index) % ROTATION].append(index)
    return list(indices_of_question.values())


def _is_correct(text: str, row: TsvRow) -> bool:
    """Returns whether an answer chooses the correct option of a row."""
    return option_letter(text, options_of(row)) == row["answer"]


def _make_grader(root: Path, edition: Edition) -> Callable[[GivenAnswer], float | None]:
    """Grades an answer to one row; see `Benchmark.make_grader`."""
    return grade_by_id(_read_dev(root, edition), _is_correct)


def _advise(edition: Edition) -> str:
    """Returns the end of a message that explains how the test split is scored."""
    return (
        "the test split is scored by the server only: write a submission with "
        f"`stepprune-convert {edition.name}` and upload it at {SERVER}"
    )


def _read_dev(root: str | Path, edition: Edition) -> dict[str, TsvRow]:
    """Reads the rows of the dev file by index.

    Args:
        root: folder of LLaVA's layout.
        edition: the edition.

    Raises:
        UserError: a row has no correct answer, as in the test files.
    """
    path = _find_files(root, edition, edition.dev)[0]
    rows = _rows_by_index(path)
    for index, row in rows.items():
        if row.get("answer") is None:
            raise UserError(
                f"{path}: index {index}: no letter in a column answer; {_advise(edition)}"
            )
    return rows


def _read_first_round(answers: str | Path) -> list[GivenAnswer]:
    """Reads an answer file, and refuses answers to rotations that LLaVA's program generated.

    LLaVA's program can rotate the options of a row itself. It numbers the rotations by `round_id`,
    starting at 0. In a later round, a letter means another option than in the row of the file.

    Args:
        answers: path of the answer file.

    Returns:
        The lines in the order of the file.

    Raises:
        UserError: a line has another `round_id` than 0.
    """
    lines = read_answers(answers)
    for line in lines:
        round_id = line.fields.get("round_id", 0)
        if round_id != 0:
            raise UserError(
                f"{line.place}: expected round_id 0, got {round_id!r}: the file was written with "
                "--all-rounds, which is not used here (the rotations are rows of the question file)"
            )
    return lines


def _find_files(root: str | Path, edition: Edition, *names: str) -> list[Path]:
    """Returns the existing files of an edition.

    Args:
        root: folder of LLaVA's layout.
        edition: the edition. A file may be in any of its folders; the first folder counts.
        *names: names of the files.

    Raises:
        FileNotFoundError: none of the files exists.
    """
    paths = []
    for name in names:
        candidates = (Path(root) / folder / name for folder in edition.folders)
        paths += [path for path in candidates if path.is_file()][:1]
    if not paths:
        raise FileNotFoundError(
            f"no {' or '.join(names)} in {root}: get it from {SOURCE}; {_advise(edition)}"
        )
    return paths


def convert(
    root: str | Path, answers: str | Path, out: str | Path, *, edition: Edition = ENGLISH
) -> list[str]:
    """Writes a submission to the server, an Excel sheet.

    The sheet has the rows of one question file: the dev or test file with most of the answered
    rows. The column "prediction" has the last answer to each row; unanswered rows have an empty
    cell.
    The columns hint, category, l2-category, source, image and comment are omitted.

    Args:
        root: folder of LLaVA's layout.
        answers: the answer file.
        out: path of the sheet.
        edition: the edition.

    Returns:
        Warnings about repeated, unknown and missing answers.
    """
    lines, warnings = _read_first_round(answers), []
    answered_indices = {line.id for line in lines}
    question_files = map(_rows_by_index, _find_files(root, edition, edition.dev, *edition.test))
    rows = max(question_files, key=lambda file_rows: len(answered_indices & file_rows.keys()))
    answer_of = latest_answers(lines, rows, warnings)
    first_row = next(iter(rows.values()))
    columns = [column for column in first_row if column not in _OMITTED_COLUMNS]
    columns.insert(_PREDICTION_COLUMN, "prediction")
    sheet = [columns]
    for index, row in rows.items():
        prediction = answer_of[index].text if index in answer_of else None
        cells = {**row, "index": int(index), "prediction": prediction}
        sheet.append([cells[column] for column in columns])
    layout.write_submission(out, xlsx(sheet))
    return warnings


# Characters that XML 1.0 cannot hold. openpyxl rejects only the control characters.
_NOT_XML = re.compile("[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")


def xlsx(rows: Iterable[Sequence[str | int | None]]) -> bytes:
    """Returns the bytes of an Excel workbook with one sheet.

    Characters that XML cannot represent are dropped, and a text is truncated to 32,767 characters,
    the limit of a cell. Readers treat each line end as a newline, as in the sheets of LLaVA's
    program.

    Args:
        rows: values of the cells.
    """
    # Only submissions need this optional package.
    from openpyxl import Workbook
    from openpyxl.cell import WriteOnlyCell

    workbook = Workbook(write_only=True)
    sheet = workbook.create_sheet("Sheet1")

    for row in rows:
        values = [_NOT_XML.sub("", value) if isinstance(value, str) else value for value in row]
        cells = [WriteOnlyCell(sheet, value) for value in values]
        for cell in cells:
            if cell.data_type in "fe":  # openpyxl reads "=1+1" as a formula and "#N/A" as an error
                cell.data_type = "s"
        sheet.append(cells)
    buffer = io.BytesIO()
    workbook.save(buffer)
    return buffer.getvalue()


def _benchmark(edition: Edition, title: str, instruction: str) -> Benchmark:
    """Returns the benchmark of an edition; `instruction` is its request for a letter."""
    return Benchmark(
        name=edition.name,
        title=title,
        headline="circular accuracy in percent, dev",
        question_files=tuple(f"{folder}/{edition.dev}" for folder in edition.folders),
        question_source=SOURCE,
        read=partial(read_list, instruction=instruction),
        max_new_tokens=1024,
        score=partial(score, edition=edition),
        make_grader=partial(_make_grader, edition=edition),
        convert=partial(convert, edition=edition),
        submission_suffix=".xlsx",
    )


BENCHMARK = _benchmark(ENGLISH, "MMBench", OPTION_LETTER)
BENCHMARK_CN = _benchmark(CHINESE, "MMBench-CN", "\n请直接回答选项字母。")
