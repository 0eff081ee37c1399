"""MME: fourteen tasks of yes-or-no questions, two questions per image.

A task's score is the accuracy plus the accuracy of images, which requires both answers. The
official program assumes that two consecutive lines of a task belong to one image. Here the two
answers are joined by their image, and the figures of consecutive lines are also reported.
"""

import re
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import NamedTuple

from stepprune_jax.benchmarks import layout
from stepprune_jax.benchmarks.answers import GivenAnswer, latest_answers, read_answers
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
# Request at the end of the questions in the release.
_REQUEST = " Please answer yes or no."


class MmeQuestion(NamedTuple):
    """A question of the release.

    Attributes:
        task: name of the task.
        file: name of the text file, which is the image's name with another suffix.
        text: the question.
        truth: "Yes" or "No".
    """

    task: str
    file: str
    text: str
    truth: str


class OfficialLine(NamedTuple):
    """A line of the official text files.

    Attributes:
        question: the question.
        answer: the model's answer without newlines and tabs.
    """

    question: MmeQuestion
    answer: str

    @property
    def is_correct(self) -> bool:
        """Whether the official program reads the answer as the truth."""
        return parse_yes_no(self.answer) == self.question.truth.lower()


def parse_yes_no(text: str) -> str:
    """Parses an answer as MME's program does, by its first four characters.

    Returns:
        "yes" if they contain yes in any case, otherwise "no" if they contain no, otherwise "other",
        which is always wrong.
    """
    start = text.lower()[:4]
    return next((word for word in ("yes", "no") if word in start), "other")


def on_one_line(text: str) -> str:
    """Removes tabs and newlines around an answer, and replaces those inside by blanks."""
    return "".join(" " if mark in "\t\r\n" else mark for mark in text.strip("\t\r\n"))


def score(root: str | Path, answers: str | Path, *, pairs: str = "image") -> Score:
    """Scores answers to MME. Their `prompt` distinguishes the two questions of an image.

    Args:
        root: folder of LLaVA's layout.
        answers: the answer file.
        pairs: "image" pairs the two answers to an image. "position" pairs consecutive answers of a
            task, as the official program does.

    Returns:
        The headline is perception + cognition, at most 2,800. A task's score is 100 times (fraction
        of correct answers + fraction of images with two correct answers). Parts: the two sums; the
        score, accuracies, and number of answers that are neither yes nor no of each task; and
        `by_position`, the two sums with the official pairs, or None if a task has an odd number of
        answers.
    """
    release = _read_release(Path(root) / "MME")
    rows = _match_release(read_answers(answers), release)
    warnings = layout.size_warnings(f"{RELEASE}, questions", len(release), QUESTIONS)
    answer_of = latest_answers(rows, release, warnings)
    by_image = _parts(_image_pairs(_make_lines(answer_of.values(), release)))
    position = _consecutive_pairs(_make_lines(rows, release))
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
    position_sums = None if by_position is None else {name: by_position[name] for name in sums}
    counts = {"questions": len(release), "answered": len(answer_of)}
    return Score(_total(parts), {**parts, "by_position": position_sums, **counts}, warnings)


def _make_grader(root: Path) -> Callable[[GivenAnswer], float | None]:
    """Grades an answer as right or wrong; see `Benchmark.make_grader`."""
    release = _read_release(Path(root) / "MME")

    def grade(answer: GivenAnswer) -> float | None:
        lines = _make_lines(_match_release([answer], release), release)
        return float(lines[0].is_correct) if lines else None

    return grade


def convert(root: str | Path, answers: str | Path, out: str | Path) -> list[str]:
    """Writes the text files that MME's program reads, one per task.

    Images are in the order of their first answers, and the two questions of an image follow each
    other. The last of several answers to a question is written.

    Args:
        root: folder of LLaVA's layout.
        answers: the answer file.
        out: folder of the text files; created if needed.

    Returns:
        No warnings.

    Raises:
        ValueError: a task or a question of an image has no answer. Nothing is written.
    """
    release = _read_release(Path(root) / "MME")
    rows = _match_release(read_answers(answers), release)
    answer_of = latest_answers(rows, release, [])
    answered_ids = dict.fromkeys(row.id for row in rows if row.id in answer_of)
    pairs = _image_pairs(_make_lines([answer_of[name] for name in answered_ids], release))
    out = Path(out)
    out.mkdir(parents=True, exist_ok=True)
    for task, images in pairs.items():
        lines = [
            "\t".join((line.question.file, line.question.text, line.question.truth, line.answer))
            for image in images
            for line in image
        ]
        # An answer may contain an unpaired surrogate, which UTF-8 cannot encode.
        text = "".join(f"{line}\n" for line in lines)
        (out / f"{task}.txt").write_bytes(text.encode("utf-8", "replace"))
    return []


def _read_release(folder: Path) -> dict[str, MmeQuestion]:
    """Reads all questions by name, from the text files of all tasks."""
    release = {}
    for task in (*PERCEPTION, *COGNITION):
        task_folder = folder / RELEASE / task
        if (task_folder / "questions_answers_YN").is_dir():
            task_folder = task_folder / "questions_answers_YN"
        files = sorted(task_folder.glob("*.txt"))
        if not files:
            raise FileNotFoundError(f"no text files in {task_folder}: get {RELEASE} from {_SOURCE}")
        for file in files:
            for text, truth in _read_questions(file):
                release[_name(task, file.name, text)] = MmeQuestion(task, file.name, text, truth)
    return release


def _name(task: str, file: str, text: str) -> str:
    """Returns a unique name of a question. File names are only unique within a task."""
    return f"{task}/{file}: {text}"


def _read_questions(file: Path) -> list[tuple[str, str]]:
    """Reads the two questions of an image, each with "Yes" or "No"."""
    lines = read_text(file).rstrip("\n").split("\n")
    matches = [re.fullmatch("([^\t]*)\t(Yes|No)", line.strip(), re.DOTALL) for line in lines]
    pairs = [(match[1], match[2]) for match in matches if match]
    if not len(pairs) == len(lines) == 2:
        raise UserError(f"{file}: expected two lines, each a question, a tab and Yes or No")
    return pairs


def _match_release(
    answers: list[GivenAnswer], release: dict[str, MmeQuestion]
) -> list[GivenAnswer]:
    """Replaces the ids of answers by the names of their questions in the release.

    An answer to an unknown question keeps its id.
    """
    rows = []
    for answer in answers:
        path = answer.id.split("/")
        file = path[-1].split(".")[0] + ".txt"
        text = answer.prompt.replace(WORD_OR_PHRASE.strip(), "").strip()
        # Some questions of the release have two blanks before the request.
        endings = ("",) if _REQUEST.strip() in text else (_REQUEST, " " + _REQUEST)
        names = (_name(path[0], file, text + ending) for ending in endings)
        name = next((name for name in names if name in release), answer.id)
        rows.append(answer._replace(id=name))
    return rows


def _make_lines(
    answers: Iterable[GivenAnswer], release: dict[str, MmeQuestion]
) -> list[OfficialLine]:
    """Converts answers to questions of the release to lines of the official files."""
    return [
        OfficialLine(release[answer.id], on_one_line(answer.text))
        for answer in answers
        if answer.id in release
    ]


def _image_pairs(lines: list[OfficialLine]) -> dict[str, list[list[OfficialLine]]]:
    """Groups lines by task and image.

    Returns:
        The pairs of each task.

    Raises:
        ValueError: a task has no line, or an image has only one.
    """
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
    """Groups consecutive lines of each task into pairs, as the official program does.

    Returns:
        The pairs of each task, or None if a task has an odd number of lines.
    """
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
    """Returns the figures of each task and the two sums."""
    tasks = {}
    for task, images in pairs.items():
        lines = [line for image in images for line in image]
        accuracy = 100 * sum(line.is_correct for line in lines) / len(lines)
        num_correct_images = sum(all(line.is_correct for line in image) for image in images)
        accuracy_plus = 100 * num_correct_images / len(images)
        tasks[task] = {
            "score": accuracy + accuracy_plus,
            "accuracy": accuracy,
            "accuracy_plus": accuracy_plus,
            "neither_yes_nor_no": sum(parse_yes_no(line.answer) == "other" for line in lines),
        }
    return {
        "perception": sum(tasks[task]["score"] for task in PERCEPTION),
        "cognition": sum(tasks[task]["score"] for task in COGNITION),
        **tasks,
    }


def _total(parts: JsonObject) -> float:
    """Returns the sum of perception and cognition."""
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
    make_grader=_make_grader,
    convert=convert,
    submission_suffix="",  # a folder with one text file per task
)
