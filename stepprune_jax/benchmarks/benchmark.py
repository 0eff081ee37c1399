"""The interface of benchmarks for the stages of an evaluation: generate, convert, score."""

import dataclasses
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import NamedTuple, TypeVar

from stepprune_jax.benchmarks import layout
from stepprune_jax.benchmarks.answers import GivenAnswer, read_answers
from stepprune_jax.benchmarks.questions import BenchmarkQuestion, check_images, read_list
from stepprune_jax.data.json_files import JsonObject
from stepprune_jax.user_input import UserError

T = TypeVar("T")


class Score(NamedTuple):
    """The outcome of scoring one file of answers.

    Attributes:
        headline: the figure that papers print for this benchmark, unrounded where the
            official program does not round it.
        parts: every other figure by name, JSON values only; percentages, except counts.
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
        title: its name in papers.
        headline: description of the headline number.
        column: name of the headline number in tables of this benchmark.
        decimals: decimals of the headline number in tables.
        question_files: possible paths of LLaVA's question file, relative to the root, the preferred
            one first.
        question_source: where to get the question file.
        read: `read(path, images)` yields the questions of a file in the benchmark's form.
        images: folder that the question file's image paths start from, relative to the root; empty
            if the question file contains the images.
        image_source: where to get the images.
        calibration: question file for calibrating stop biases, relative to the root; empty to
            calibrate on some questions of the benchmark.
        keep_order: whether every answer records its kept tokens; otherwise a few samples do.
        without_ocr: removes the OCR tokens from a question, if the question file has them.
        max_new_tokens: the longest answer, in tokens, that LLaVA's program allows.
        score: `score(root, answers, **options)`.
        options: keyword options of `score`, each with its values, the default first.
        worth: `worth(root)` returns a function that grades a single answer from 0 to 1, or None if
            the correct answer is unknown. The headline need not be the mean.
        convert: `convert(root, answers, out)`, which writes the official submission or text files
            and returns its warnings; None if the official program reads the answers directly.
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
    worth: Callable[[Path], Callable[[GivenAnswer], float | None]]
    convert: Callable[[Path, Path, Path], list[str]] | None = None
    submission_suffix: str = ".json"

    def read_questions(
        self, root: str | Path, file: str = "", *, ocr: bool = True
    ) -> list[BenchmarkQuestion]:
        """Reads the questions.

        Args:
            root: folder of LLaVA's layout; for `folder` the data folder.
            file: another question file, relative to the root: any of the benchmark's splits in the
                same format, or, for VQAv2, the official questions of a split.
            ocr: whether prompts keep their OCR tokens, as for LLaVA's figures on TextVQA.

        Returns:
            The questions in the order of the file, at least one.

        Raises:
            FileNotFoundError: the file or an image is missing.
            ValueError: the file is malformed; the message names file, line and field.
        """
        root = Path(root)
        places = [root / name for name in ([file] if file else self.question_files)]
        path = next((place for place in places if place.is_file()), places[0])
        layout.file(path, self.question_source)
        questions = list(self.read(path, root / self.images))
        if not questions:
            raise UserError(f"{path}: expected at least one question, got none")
        check_images(questions, self.image_source)
        if self.without_ocr is not None and not ocr:
            questions = [self.without_ocr(question) for question in questions]
        return questions

    def judge(self, root: str | Path, answers: str | Path) -> list[float | None]:
        """Grades each line of an answer file separately.

        Args:
            root: as for `score`.
            answers: answer file.

        Returns:
            `worth` of each line.

        Raises:
            FileNotFoundError: a file is missing.
            ValueError: a malformed file.
        """
        worth = self.worth(Path(root))
        return [worth(answer) for answer in read_answers(answers)]


def worth_by_id(
    truths: Mapping[str, T], judge: Callable[[str, T], float | bool]
) -> Callable[[GivenAnswer], float | None]:
    """Returns a function that grades answers by the ids of their questions; see `Benchmark.worth`.

    Args:
        truths: what `judge` compares the answer to each question with.
        judge: `judge(text, truth)` grades an answer from 0 to 1.
    """
    return lambda answer: (
        float(judge(answer.text, truths[answer.id])) if answer.id in truths else None
    )


def mean_percent(values: Iterable[float | bool]) -> float:
    """Averages values in percent."""
    values = list(values)
    return 100 * sum(values) / len(values)
