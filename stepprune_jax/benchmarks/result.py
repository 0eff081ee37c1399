"""What a benchmark is to the three stages of an evaluation: generate, convert, score."""

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from stepprune_jax.benchmarks.answers import Answer, read_answers

T = TypeVar("T")

WORD_OR_PHRASE = "\nAnswer the question using a single word or phrase."
OPTION_LETTER = "\nAnswer with the option's letter from the given choices directly."


class Score(NamedTuple):
    """The outcome of scoring one file of answers.

    Attributes:
        headline: the figure that papers print for this benchmark, unrounded where the
            official program does not round it.
        parts: every other figure by name, JSON values only; percentages unless the name is one
            of a count.
        warnings: what a reader of the figures must know, one sentence each.
    """

    headline: float
    parts: dict[str, Any]
    warnings: list[str]


class Benchmark(NamedTuple):
    """One benchmark in LLaVA's folder layout.

    Attributes:
        name: as given on the command line; the key in `BENCHMARKS`.
        title: as papers print it.
        headline: what the headline number is, in words.
        questions: LLaVA's question file, relative to the root.
        images: folder that the question file's image paths start from, relative to the root;
            None where the question file carries the images itself.
        instruction: what is appended to a question to make the user's message; empty where the
            question file's text is the whole message.
        max_new_tokens: the longest answer, in tokens, that LLaVA's program allows.
        score: `score(root, answers, **options)`.
        convert: `convert(root, answers, out)`, which writes the official submission or text files
            and returns their path; None where the official program reads the answers themselves.
        options: keyword options of `score`, each with its values, the default first.
        worth: `worth(root)`, a function that says what an answer is worth on its own, from 0 to
            1, or None where its question is not one of those with a known answer. The headline
            need not be the mean.
    """

    name: str
    title: str
    headline: str
    questions: str
    images: str | None
    instruction: str
    max_new_tokens: int
    score: Callable[..., Score]
    convert: Callable[[Path, Path, Path], Path] | None
    options: Mapping[str, tuple[str, ...]]
    worth: Callable[[Path], Callable[[Answer], float | None]]

    def judge(self, root: str | Path, answers: str | Path) -> list[float | None]:
        """Says what each line of an answer file is worth on its own.

        Args:
            root: as for `score`.
            answers: answer file.

        Returns:
            `worth` of each line.

        Raises:
            FileNotFoundError: a file is missing.
            ValueError: a file is not what it should be.
        """
        worth = self.worth(Path(root))
        return [worth(row) for row in read_answers(answers)]


def worth_by_id(
    known: Mapping[str, T], judge: Callable[[str, T], float | bool]
) -> Callable[[Answer], float | None]:
    """What answers are worth whose questions are found by their ids; see `Benchmark.worth`.

    Args:
        known: what there is to know of each question, by id.
        judge: what a text is worth, given that.

    Returns:
        `judge` of an answer, None of one to an unknown question.
    """
    return lambda row: float(judge(row.text, known[row.id])) if row.id in known else None


def mean_percent(values: Iterable[float | bool]) -> float:
    """The mean in percent.

    Args:
        values: what each question is worth, from 0 to 1; at least one.

    Returns:
        A number from 0 to 100.
    """
    values = list(values)
    return 100 * sum(values) / len(values)
