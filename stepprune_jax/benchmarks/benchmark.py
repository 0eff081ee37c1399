"""Interface of benchmarks: reading questions, scoring and converting answers."""

import dataclasses
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import NamedTuple, TypeVar

from stepprune_jax.benchmarks import layout
from stepprune_jax.benchmarks.answers import GivenAnswer, read_answers
from stepprune_jax.benchmarks.questions import BenchmarkQuestion, check_images, read_list
from stepprune_jax.data.json_files import JsonObject
from stepprune_jax.extras import need
from stepprune_jax.user_input import UserError

T = TypeVar("T")


class Score(NamedTuple):
    """The result of scoring one answer file.

    Attributes:
        headline: the figure that papers print for this benchmark, rounded only if the official
            program rounds it.
        parts: all other figures by name, JSON values. Percentages, except for numbers of questions.
        warnings: caveats for readers of the figures, one sentence each.
    """

    headline: float
    parts: JsonObject
    warnings: list[str]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Benchmark:
    """One benchmark in LLaVA's folder layout.

    Attributes:
        name: name on the command line; the key in `BENCHMARKS`.
        title: name in papers.
        headline: description of the headline figure.
        column: name of the headline figure in tables of this benchmark.
        decimals: decimals of the headline figure in tables.
        question_files: possible paths of LLaVA's question file, relative to the root. The first
            existing one is read.
        question_source: source of the question file, for messages.
        read: `read(path, images)` yields the questions of a file.
        images: folder of the images, relative to the root; empty if the question file contains the
            images.
        image_source: source of the images, for messages.
        calibration: question file for calibrating stop biases, relative to the root; empty to
            calibrate on some questions of the benchmark.
        keep_order: whether every answer stores its kept tokens; otherwise a few answers do.
        without_ocr: removes the OCR tokens from a question, if the question file has them.
        max_new_tokens: longest answer in tokens that LLaVA's program allows.
        score: `score(root, answers, **options)` returns the `Score` of an answer file. `root` is
            the folder of LLaVA's layout. Raises a FileNotFoundError for missing files and a
            UserError for malformed ones.
        options: values of each keyword option of `score`, the default first.
        make_grader: `make_grader(root)` returns a function that grades one answer from 0 to 1, or
            returns None if the correct answer is unknown. The headline may differ from the mean
            grade.
        convert: `convert(root, answers, out)` writes the official submission or text files, and
            returns warnings; None if the official program reads answer files.
        submission_suffix: suffix of the file that `convert` writes; empty for a folder.
    """

    name: str
    title: str
    headline: str
    column: str = "score"
    decimals: int = 1
    question_files: tuple[str, ...]
    question_source: str = "LLaVA's eval.zip"
    read: Callable[[Path, Path], Iterable[BenchmarkQuestion]] = read_list
    images: str = ""
    image_source: str = ""
    calibration: str = ""
    keep_order: bool = False
    without_ocr: Callable[[BenchmarkQuestion], BenchmarkQuestion] | None = None
    max_new_tokens: int
    score: Callable[..., Score]
    options: Mapping[str, tuple[str, ...]] = dataclasses.field(default_factory=dict)
    make_grader: Callable[[Path], Callable[[GivenAnswer], float | None]]
    convert: Callable[[Path, Path, Path], list[str]] | None = None
    submission_suffix: str = ".json"

    def check_packages(self) -> None:
        """Checks that the packages of `convert` are installed, before answers are computed.

        Raises:
            MissingPackageError: the submission is an Excel workbook, and openpyxl is not installed.
        """
        if self.submission_suffix == ".xlsx":
            need("openpyxl", f"the submission of {self.name} is a workbook")

    def read_questions(
        self, root: str | Path, file: str = "", *, ocr: bool = True
    ) -> list[BenchmarkQuestion]:
        """Reads the questions of the benchmark, and checks that their images exist.

        Args:
            root: folder of LLaVA's layout; for the benchmark `folder`, the data folder.
            file: path of the question file relative to the root. It may be any split of the
                benchmark in the format of the published file or, for VQAv2, in the official format.
                "" selects the published file.
            ocr: whether TextVQA's prompts keep their OCR tokens, as in LLaVA's evaluation.

        Returns:
            The questions in the order of the file, at least one.

        Raises:
            FileNotFoundError: the file or an image is missing.
            UserError: the file is malformed; the message names file, line and field.
        """
        root = Path(root)
        candidates = [root / name for name in ([file] if file else self.question_files)]
        path = next((path for path in candidates if path.is_file()), candidates[0])
        layout.require_file(path, self.question_source)  # raises if no candidate exists
        questions = list(self.read(path, root / self.images))
        if not questions:
            raise UserError(f"{path}: expected at least one question, got none")
        check_images(questions, self.image_source)
        if self.without_ocr is not None and not ocr:
            questions = [self.without_ocr(question) for question in questions]
        return questions

    def judge(self, root: str | Path, answers: str | Path) -> list[float | None]:
        """Grades each line of an answer file.

        Args:
            root: folder of LLaVA's layout.
            answers: path of the answer file.

        Returns:
            A grade from 0 to 1 for each line; None if the correct answer is unknown.

        Raises:
            FileNotFoundError: a file is missing.
            UserError: a file is malformed.
        """
        grade = self.make_grader(Path(root))
        return [grade(answer) for answer in read_answers(answers)]


def grade_by_id(
    truths: Mapping[str, T], judge: Callable[[str, T], float | bool]
) -> Callable[[GivenAnswer], float | None]:
    """Returns a grader that finds the correct answer by question id; see `Benchmark.make_grader`.

    Args:
        truths: by question id, the correct answer or other data that `judge` needs.
        judge: `judge(text, truth)` grades the text of an answer from 0 to 1.
    """

    def grade(answer: GivenAnswer) -> float | None:
        if answer.id not in truths:
            return None
        return float(judge(answer.text, truths[answer.id]))

    return grade
