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
        "yes" if the characters contain yes in any case, otherwise "no" if they contain no in any
        case, otherwise "other", which is always wrong.
    """
    start = text.lower()[:4]
    return next((word for word in ("yes", "no") if word in start), "other")


def on_one_line(text: str) -> str:
    """Removes tabs and newlines at both ends of an answer, and replaces all others by blanks."""
    return re.sub("[\t\r\n]", " ", text.strip("\t\r\n"))


def score(root: str | Path, answers: str | Path, *, pairs: str = "image") -> Score:
    """Scores answers to MME.

    Each image has two questions. The score of a task is 100 times (fraction of correct answers +
    fraction of images with two correct answers).

    Args:
        root: folder of LLaVA's layout.
        answers: the answer file. The field `prompt` distinguishes the two questions of an image.
        pairs: "image" pairs the two answers to an image. "position" pairs consecutive answers of a
            task, as the official program does.

    Returns:
        The headline is perception + cognition, two sums of task scores, at most 2,800. Parts: the
        two sums; the score, accuracies, and number of answers that are neither yes nor no of each
        task; and `by_position`, the two sums with the official pairs, or None if a task has an odd
        number of answers.
    """
    release = _read_release(Path(root) / "MME")
    named_answers = _match_release(read_answers(answers), release)
    warnings = layout.size_warnings(f"{RELEASE}, questions", len(release), QUESTIONS)
    answer_of = latest_answers(named_answers, release, warnings)
    by_image = _compute_parts(_image_pairs(_make_lines(answer_of.values(), release)))
    consecutive_pairs = _consecutive_pairs(_make_lines(named_answers, release))
    by_position = None if consecutive_pairs is None else _compute_parts(consecutive_pairs)
    if by_position != by_image:
        official_total = "nothing" if by_position is None else f"{_total(by_position):.2f}"
        warnings.append(
            "the two answers to an image do not always follow each other: the official program, "
            f"which takes consecutive lines, would print {official_total}, by image it is "
            f"{_total(by_image):.2f}"
        )
    parts, position_sums = by_image, None
    if by_position is not None:
        position_sums = {name: by_position[name] for name in ("perception", "cognition")}
    if pairs == "position":
        if by_position is None:
            raise UserError(f"{answers}: a task has an odd number of answers: no pairs by position")
        parts = by_position
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
        An empty list: there are no warnings.

    Raises:
        UserError: a task has no answer, or only one question of an image has an answer. Nothing is
            written.
    """
    release = _read_release(Path(root) / "MME")
    named_answers = _match_release(read_answers(answers), release)
    answer_of = latest_answers(named_answers, release, [])
    # Names in the order of their first answers; `answer_of` is in the order of the release.
    answered_names = dict.fromkeys(answer.id for answer in named_answers if answer.id in answer_of)
    pairs = _image_pairs(_make_lines([answer_of[name] for name in answered_names], release))
    out = Path(out)
    out.mkdir(parents=True, exist_ok=True)
    for task, task_pairs in pairs.items():
        lines = [
            "\t".join((line.question.file, line.question.text, line.question.truth, line.answer))
            for pair in task_pairs
            for line in pair
        ]
        text = "".join(f"{line}\n" for line in lines)
        # An answer may contain an unpaired surrogate, which UTF-8 cannot encode.
        (out / f"{task}.txt").write_bytes(text.encode("utf-8", "replace"))
    return []


def _read_release(folder: Path) -> dict[str, MmeQuestion]:
    """Reads the questions of all tasks from MME's release.

    The text files of a task are in the task's folder, or in its subfolder "questions_answers_YN".

    Args:
        folder: folder that contains the release.

    Returns:
        The questions by `_question_name`.

    Raises:
        FileNotFoundError: a task has no text files.
        UserError: a file is malformed.
    """
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
                release[_question_name(task, file.name, text)] = MmeQuestion(
                    task, file.name, text, truth
                )
    return release


def _question_name(task: str, file: str, text: str) -> str:
    """Returns a unique name of a question. Different tasks have files with equal names."""
    return f"{task}/{file}: {text}"


def _read_questions(file: Path) -> list[tuple[str, str]]:
    """Reads the two questions of an image.

    Args:
        file: a text file of the release. Its two lines have a question, a tab, and "Yes" or "No".

    Returns:
        Two pairs (question, correct answer).
    """
    lines = read_text(file).rstrip("\n").split("\n")
    matches = [re.fullmatch("([^\t]*)\t(Yes|No)", line.strip(), re.DOTALL) for line in lines]
    questions = [(match[1], match[2]) for match in matches if match]
    if not len(questions) == len(lines) == 2:
        raise UserError(f"{file}: expected two lines, each a question, a tab and Yes or No")
    return questions


def _match_release(
    answers: list[GivenAnswer], release: dict[str, MmeQuestion]
) -> list[GivenAnswer]:
    """Replaces the ids of answers, which name an image, by the names of their questions.

    Args:
        answers: answers of LLaVA's format: the id is "TASK/IMAGE", and the prompt is the question,
            with LLaVA's request for a short answer and usually without MME's request.
        release: questions by `_question_name`.

    Returns:
        The answers. An answer to an unknown question keeps its id.
    """
    named_answers = []
    for answer in answers:
        path = answer.id.split("/")
        task, file = path[0], path[-1].split(".")[0] + ".txt"
        text = answer.prompt.replace(WORD_OR_PHRASE.strip(), "").strip()
        # Some questions of the release have two blanks before the request.
        endings = ("",) if _REQUEST.strip() in text else (_REQUEST, " " + _REQUEST)
        names = (_question_name(task, file, text + ending) for ending in endings)
        matching_name = next((name for name in names if name in release), answer.id)
        named_answers.append(answer._replace(id=matching_name))
    return named_answers


def _make_lines(
    answers: Iterable[GivenAnswer], release: dict[str, MmeQuestion]
) -> list[OfficialLine]:
    """Converts answers to lines of the official files; skips answers to unknown questions.

    Args:
        answers: answers whose ids are names of questions, from `_match_release`.
        release: questions by name.
    """
    return [
        OfficialLine(release[answer.id], on_one_line(answer.text))
        for answer in answers
        if answer.id in release
    ]


def _image_pairs(lines: list[OfficialLine]) -> dict[str, list[list[OfficialLine]]]:
    """Groups lines by task and image.

    Args:
        lines: lines of all tasks, in any order.

    Returns:
        By task, a list of two lines for each image.

    Raises:
        UserError: a task has no line, or an image has only one.
    """
    lines_by_task: dict[str, dict[str, list[OfficialLine]]] = {
        task: {} for task in (*PERCEPTION, *COGNITION)
    }
    for line in lines:
        lines_by_task[line.question.task].setdefault(line.question.file, []).append(line)
    for task, lines_by_file in lines_by_task.items():
        if not lines_by_file:
            raise UserError(f"no answer to a question of task {task}")
        for file, pair in lines_by_file.items():
            if len(pair) != 2:
                raise UserError(
                    f"{task}/{file}: one of the two questions is answered, the other is not: "
                    f"answer both (answered: {pair[0].question.text!r})"
                )
    return {task: list(by_file.values()) for task, by_file in lines_by_task.items()}


def _consecutive_pairs(lines: list[OfficialLine]) -> dict[str, list[list[OfficialLine]]] | None:
    """Groups consecutive lines of each task into pairs, as the official program does.

    Args:
        lines: lines of all tasks, in the order of the answer file.

    Returns:
        By task, the pairs of lines; None if a task has an odd number of lines.
    """
    lines_by_task: dict[str, list[OfficialLine]] = {task: [] for task in (*PERCEPTION, *COGNITION)}
    for line in lines:
        lines_by_task[line.question.task].append(line)
    if any(len(task_lines) % 2 for task_lines in lines_by_task.values()):
        return None
    return {
        task: [task_lines[start : start + 2] for start in range(0, len(task_lines), 2)]
        for task, task_lines in lines_by_task.items()
    }


def _compute_parts(pairs: dict[str, list[list[OfficialLine]]]) -> JsonObject:
    """Computes the figures of each task, and the sums of the two groups of tasks.

    Args:
        pairs: by task, the pairs of lines that are treated as the two answers to an image.
    """
    figures = {}
    for task, task_pairs in pairs.items():
        lines = [line for pair in task_pairs for line in pair]
        accuracy = 100 * sum(line.is_correct for line in lines) / len(lines)
        num_correct_pairs = sum(all(line.is_correct for line in pair) for pair in task_pairs)
        accuracy_plus = 100 * num_correct_pairs / len(task_pairs)
        figures[task] = {
            "score": accuracy + accuracy_plus,
            "accuracy": accuracy,
            "accuracy_plus": accuracy_plus,
            "neither_yes_nor_no": sum(parse_yes_no(line.answer) == "other" for line in lines),
        }
    return {
        "perception": sum(figures[task]["score"] for task in PERCEPTION),
        "cognition": sum(figures[task]["score"] for task in COGNITION),
        **figures,
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
