"""MME: fourteen yes-or-no tasks, two questions per image, an extra point if both are right.

The official program assumes that two consecutive lines of a task belong to an image. Here the two
answers to an image are joined by image; the figures of consecutive lines are also reported.
"""

import re
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import NamedTuple

from stepprune_jax.benchmarks import layout
from stepprune_jax.benchmarks.answers import GivenAnswer, latest, read_answers
from stepprune_jax.benchmarks.benchmark import Benchmark, Score
from stepprune_jax.benchmarks.questions import WORD_OR_PHRASE
from stepprune_jax.data.json_files import JsonObject, read_text
from stepprune_jax.user_input import UserError

PERCEPTION = (
    "existence",
    "count",
    "position",
    "color",
    "posters",
    "celebrity",
    "scene",
    "landmark",
    "artwork",
    "OCR",
)
COGNITION = (
    "commonsense_reasoning",
    "numerical_calculation",
    "text_translation",
    "code_reasoning",
)
PAIRS = ("image", "position")
RELEASE = "MME_Benchmark_release_version"
QUESTIONS = 2374
_SOURCE = "MME's authors (github.com/BradyFU/Awesome-Multimodal-Large-Language-Models)"
_ASK = " Please answer yes or no."


class MmeQuestion(NamedTuple):
    """A question of the release: its task, its text file, its text, and `Yes` or `No`."""

    task: str
    file: str
    text: str
    truth: str


class OfficialLine(NamedTuple):
    """A line of the official text files: a question, and the answer to it on one line."""

    question: MmeQuestion
    answer: str

    @property
    def right(self) -> bool:
        """Returns whether the answer is read as the truth."""
        return reading(self.answer) == self.question.truth.lower()


def reading(text: str) -> str:
    """Reads an answer as MME's program does, by its first four characters.

    It is "yes" if they contain yes in any case, otherwise "no" if they contain no, otherwise
    "other", which is always wrong.
    """
    start = text.lower()[:4]
    return next((word for word in ("yes", "no") if word in start), "other")


def on_one_line(text: str) -> str:
    """Strips tabs and line ends from an answer; those inside become blanks."""
    return "".join(" " if mark in "\t\r\n" else mark for mark in text.strip("\t\r\n"))


def score(root: str | Path, answers: str | Path, *, pairs: str = "image") -> Score:
    """Scores answers to MME; their `prompt` distinguishes the questions of an image.

    The headline is perception + cognition, at most 2,800. A task's score is 100 x (share of right
    answers + share of images with both right). Parts: the two sums, each task's score, accuracies
    and number of answers that are neither yes nor no, and under `by_position` the two sums of the
    official pairs, null where a task has an odd number of answers. Pairs are the two answers to one
    "image", or by "position" two consecutive answers of a task, as in the official program.
    """
    release = _read_release(Path(root) / "MME")
    rows = _matched(read_answers(answers), release)
    warnings = layout.size_warnings(f"{RELEASE}, questions", len(release), QUESTIONS)
    kept = latest(rows, release, warnings)
    by_image = _parts(_image_pairs(_lines(kept.values(), release)))
    position = _consecutive_pairs(_lines(rows, release))
    by_position = None if position is None else _parts(position)
    if by_position != by_image:
        total = "nothing" if by_position is None else f"{_total(by_position):.2f}"
        warnings.append(
            "the two answers to an image do not always follow each other: the official program, "
            f"which takes consecutive lines, would print {total}, by image it is "
            f"{_total(by_image):.2f}"
        )
    if pairs == "position" and by_position is None:
        raise UserError(f"{answers}: a task has an odd number of answers: no pairs by position")
    parts = {"image": by_image, "position": by_position}[pairs]
    sums = ("perception", "cognition")
    beside = None if by_position is None else {name: by_position[name] for name in sums}
    counts = {"questions": len(release), "answered": len(kept)}
    return Score(_total(parts), {**parts, "by_position": beside, **counts}, warnings)


def _worth(root: Path) -> Callable[[GivenAnswer], float | None]:
    """Grades an answer as right or wrong; see `Benchmark.worth`."""
    release = _read_release(Path(root) / "MME")

    def worth(row: GivenAnswer) -> float | None:
        lines = _lines(_matched([row], release), release)
        return float(lines[0].right) if lines else None

    return worth


def convert(root: str | Path, answers: str | Path, out: str | Path) -> list[str]:
    """Writes the text files that MME's own program reads, one per task, into a folder.

    Images are in the order of their first answers, with both questions of an image together; the
    last of several answers to a question is written. Nothing is written if an answer is missing.
    """
    release = _read_release(Path(root) / "MME")
    rows = _matched(read_answers(answers), release)
    kept = latest(rows, release, [])
    first = dict.fromkeys(row.id for row in rows if row.id in kept)
    pairs = _image_pairs(_lines([kept[name] for name in first], release))
    out = Path(out)
    out.mkdir(parents=True, exist_ok=True)
    for task, images in pairs.items():
        lines = [
            "\t".join((line.question.file, line.question.text, line.question.truth, line.answer))
            for image in images
            for line in image
        ]
        # An answer may hold half of a surrogate pair, which cannot be encoded.
        text = "".join(f"{line}\n" for line in lines)
        (out / f"{task}.txt").write_bytes(text.encode("utf-8", "replace"))
    return []


def _read_release(folder: Path) -> dict[str, MmeQuestion]:
    """Reads all questions by name, from the text files of all tasks."""
    release = {}
    for task in (*PERCEPTION, *COGNITION):
        place = folder / RELEASE / task
        if (place / "questions_answers_YN").is_dir():
            place = place / "questions_answers_YN"
        files = sorted(place.glob("*.txt"))
        if not files:
            raise FileNotFoundError(f"no text files in {place}: get {RELEASE} from {_SOURCE}")
        for file in files:
            for text, truth in _read_questions(file):
                release[_name(task, file.name, text)] = MmeQuestion(task, file.name, text, truth)
    return release


def _name(task: str, file: str, text: str) -> str:
    """Returns a unique name of a question; an image has two."""
    return f"{task}/{file}: {text}"


def _read_questions(file: Path) -> list[tuple[str, str]]:
    """Reads the two questions of an image and their truths."""
    lines = read_text(file).rstrip("\n").split("\n")
    matches = [re.fullmatch("([^\t]*)\t(Yes|No)", line.strip(), re.DOTALL) for line in lines]
    pairs = [(match[1], match[2]) for match in matches if match]
    if not len(pairs) == len(lines) == 2:
        raise UserError(f"{file}: expected two lines, each a question, a tab and Yes or No")
    return pairs


def _matched(answers: list[GivenAnswer], release: dict[str, MmeQuestion]) -> list[GivenAnswer]:
    """Returns the answers with their questions' names as ids; unknown ones keep their ids."""
    rows = []
    for answer in answers:
        path = answer.id.split("/")
        file = path[-1].split(".")[0] + ".txt"
        text = answer.prompt.replace(WORD_OR_PHRASE.strip(), "").strip()
        # Some questions of the release have two blanks before the request.
        endings = ("",) if _ASK.strip() in text else (_ASK, " " + _ASK)
        names = (_name(path[0], file, text + ending) for ending in endings)
        name = next((name for name in names if name in release), answer.id)
        rows.append(answer._replace(id=name))
    return rows


def _lines(answers: Iterable[GivenAnswer], release: dict[str, MmeQuestion]) -> list[OfficialLine]:
    """Converts answers to questions of the release to lines of the official files."""
    return [
        OfficialLine(release[answer.id], on_one_line(answer.text))
        for answer in answers
        if answer.id in release
    ]


def _image_pairs(lines: list[OfficialLine]) -> dict[str, list[list[OfficialLine]]]:
    """Groups lines by image and task; all tasks must be present, and both lines of an image."""
    names = (*PERCEPTION, *COGNITION)
    tasks: dict[str, dict[str, list[OfficialLine]]] = {task: {} for task in names}
    for line in lines:
        tasks[line.question.task].setdefault(line.question.file, []).append(line)
    for task, images in tasks.items():
        if not images:
            raise UserError(f"no answer to a question of task {task}")
        for file, pair in images.items():
            if len(pair) != 2:
                raise UserError(
                    f"{task}/{file}: one of the two questions is answered, the other is not: "
                    f"answer both (answered: {pair[0].question.text!r})"
                )
    return {task: list(images.values()) for task, images in tasks.items()}


def _consecutive_pairs(lines: list[OfficialLine]) -> dict[str, list[list[OfficialLine]]] | None:
    """Returns the official pairs; None if a line is unpaired."""
    tasks: dict[str, list[OfficialLine]] = {task: [] for task in (*PERCEPTION, *COGNITION)}
    for line in lines:
        tasks[line.question.task].append(line)
    if any(len(rows) % 2 for rows in tasks.values()):
        return None
    return {
        task: [rows[start : start + 2] for start in range(0, len(rows), 2)]
        for task, rows in tasks.items()
    }


def _parts(pairs: dict[str, list[list[OfficialLine]]]) -> JsonObject:
    """Computes the figures of every task and the two sums."""
    tasks = {}
    for task, images in pairs.items():
        lines = [line for image in images for line in image]
        accuracy = 100 * sum(line.right for line in lines) / len(lines)
        plus = 100 * sum(all(line.right for line in image) for image in images) / len(images)
        unclear = sum(reading(line.answer) == "other" for line in lines)
        tasks[task] = {
            "score": accuracy + plus,
            "accuracy": accuracy,
            "accuracy_plus": plus,
            "neither_yes_nor_no": unclear,
        }
    return {
        "perception": sum(tasks[task]["score"] for task in PERCEPTION),
        "cognition": sum(tasks[task]["score"] for task in COGNITION),
        **tasks,
    }


def _total(parts: JsonObject) -> float:
    """Adds perception and cognition."""
    return parts["perception"] + parts["cognition"]


BENCHMARK = Benchmark(
    name="mme",
    title="MME",
    headline="perception + cognition",
    decimals=0,
    question_files=("MME/llava_mme.jsonl",),
    images=f"MME/{RELEASE}",
    image_source=_SOURCE,
    max_new_tokens=128,
    score=score,
    options={"pairs": PAIRS},
    worth=_worth,
    convert=convert,
    submission_suffix="",  # a folder, with one text file a task
)
