"""POPE: is the object in the image? Yes or no, in three splits that differ in the absent objects.

The official program joins answers and labels by their position in the files. Here both are
joined by question; the figures of the official join are also reported.
"""

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import NamedTuple

from stepprune_jax.benchmarks import layout
from stepprune_jax.benchmarks.answers import GivenAnswer, latest_answers, read_answers
from stepprune_jax.benchmarks.benchmark import Benchmark, Score, grade_by_id
from stepprune_jax.data.json_files import field, identity, read_json_lines, words
from stepprune_jax.user_input import UserError

QUESTIONS = "llava_pope_test.jsonl"
# Splits of the published list with their sizes.
SPLITS = {"adversarial": 3000, "random": 2910, "popular": 3000}
_SOURCE = (
    "github.com/AoiDragon/POPE, folder output/coco at commit e3e3926, from which LLaVA's list was "
    "made (later files differ)"
)
JOINS = ("question", "position")
_MEANS = ("mean_f1", "mean_accuracy", "pooled_f1")
_NO = frozenset(("No", "no", "not"))


class _Question(NamedTuple):
    """A question of LLaVA's list with its label: whether the object is present."""

    id: str
    split: str
    label: bool


class Counts(NamedTuple):
    """Numbers of predictions by outcome, where "yes" is positive.

    Attributes:
        tp: true positives.
        fp: false positives.
        tn: true negatives.
        fn: false negatives.
    """

    tp: int
    fp: int
    tn: int
    fn: int

    def figures(self) -> dict[str, float]:
        """Returns accuracy, precision, recall, F1 and the fraction of yes in percent.

        A figure without a denominator is 0.
        """
        tp, fp, tn, fn = self
        return {
            "accuracy": _percent(tp + tn, sum(self)),
            "precision": _percent(tp, tp + fp),
            "recall": _percent(tp, tp + fn),
            "f1": _percent(2 * tp, 2 * tp + fp + fn),
            "yes_ratio": _percent(tp + fp, sum(self)),
        }


def says_yes(text: str) -> bool:
    """Reads an answer as POPE's program does.

    Only the text before the first full stop counts. Commas are deleted, and the text is split at
    single blanks. A word that is exactly `No`, `no` or `not` makes the answer a no. Every other
    answer is a yes, also the empty one.
    """
    return _NO.isdisjoint(text.partition(".")[0].replace(",", "").split(" "))


def score(root: str | Path, answers: str | Path, *, join: str = "question") -> Score:
    """Scores answers to POPE.

    Args:
        root: folder of LLaVA's layout.
        answers: the answer file.
        join: "question" finds the label of an answer by its id. "position" finds it by the position
            of the answer among the answers of its split, as the official program does.

    Returns:
        The headline is 100 times the mean of the F1 scores of the three splits. Parts: accuracy,
        precision, recall, F1 and yes ratio of each split, the mean accuracy, the F1 over all
        splits, and under `by_position` the means of the official join.
    """
    folder = Path(root) / "pope"
    rows = read_answers(answers)
    questions, warnings = _read_questions(folder)
    answer_of = latest_answers(rows, questions, warnings)
    by_question = _parts(_join_by_question(answer_of, questions))
    by_position = _parts(_join_by_position(rows, questions))
    if by_question != by_position:
        warnings.append(
            "the answers are not one for one in the order of the questions: by position, as the "
            f"official program joins them, the mean F1 is {by_position['mean_f1']:.2f}, by "
            f"question {by_question['mean_f1']:.2f}"
        )
    parts = {"question": by_question, "position": by_position}[join]
    return Score(
        parts["mean_f1"],
        {
            **parts,
            "by_position": {name: by_position[name] for name in _MEANS},
            "questions": len(questions),
            "answered": len(answer_of),
        },
        warnings,
    )


def _make_grader(root: Path) -> Callable[[GivenAnswer], float | None]:
    """Grades an answer as right or wrong; see `Benchmark.make_grader`."""
    questions, _ = _read_questions(Path(root) / "pope")
    return grade_by_id(questions, lambda text, question: says_yes(text) == question.label)


def _percent(count: int, total: int) -> float:
    """Returns a fraction in percent; 0 if the total is 0."""
    return 100 * count / total if total else 0.0


def _count(pairs: Iterable[tuple[bool, bool]]) -> Counts:
    """Counts pairs of prediction and label by outcome."""
    pairs = list(pairs)
    outcomes = ((True, True), (True, False), (False, False), (False, True))
    return Counts(*(pairs.count(outcome) for outcome in outcomes))


def _join_by_question(
    answers: dict[str, GivenAnswer], questions: dict[str, _Question]
) -> dict[str, Counts]:
    """Counts the outcomes of each split. Labels are found by question."""
    return {
        split: _count(
            (says_yes(answer.text), questions[name].label)
            for name, answer in answers.items()
            if questions[name].split == split
        )
        for split in SPLITS
    }


def _join_by_position(
    rows: list[GivenAnswer], questions: dict[str, _Question]
) -> dict[str, Counts]:
    """Counts the outcomes of each split. The n-th answer is compared with the n-th label."""
    predictions = {split: [] for split in SPLITS}
    for row in rows:
        if row.id in questions:
            predictions[questions[row.id].split].append(says_yes(row.text))
    labels = {split: [q.label for q in questions.values() if q.split == split] for split in SPLITS}
    # As in the official program, answers beyond the last label are dropped.
    return {split: _count(zip(predictions[split], labels[split], strict=False)) for split in SPLITS}


def _parts(counts: dict[str, Counts]) -> dict[str, object]:
    """Returns the figures of each split and their means."""
    for split, count in counts.items():
        if not sum(count):
            raise UserError(f"no answer to a question of split {split} of {QUESTIONS}")
    figures = {split: count.figures() for split, count in counts.items()}
    pooled = Counts(*(sum(column) for column in zip(*counts.values(), strict=True)))
    return {
        "mean_f1": sum(f["f1"] for f in figures.values()) / len(figures),
        "mean_accuracy": sum(f["accuracy"] for f in figures.values()) / len(figures),
        "pooled_f1": pooled.figures()["f1"],
        **figures,
    }


def _read_questions(folder: Path) -> tuple[dict[str, _Question], list[str]]:
    """Reads the question file and the annotations.

    Returns:
        The questions by id in the order of the annotations, and warnings.
    """
    path = layout.file(folder / QUESTIONS, "LLaVA's eval.zip")
    rows: dict[str, dict[tuple[str, str], str]] = {split: {} for split in SPLITS}
    seen_ids: set[str] = set()
    for place, row in read_json_lines(path):
        split = field(row, "category", place, (*rows,).__contains__, f"one of {', '.join(rows)}")
        name = identity(row, "question_id", place)
        if name in seen_ids:
            raise UserError(f'{place}: "question_id" {name!r} is also the id of another question')
        seen_ids.add(name)
        rows[split][_key(row, place)] = name
    warnings, questions = [], {}
    for split, published in SPLITS.items():
        warnings += layout.size_warnings(f"{path.name}, {split}", len(rows[split]), published)
        for question in _labelled(folder, split, rows[split]):
            questions[question.id] = question
    return questions, warnings


def _labelled(folder: Path, split: str, ids: dict[tuple[str, str], str]) -> list[_Question]:
    """Reads the annotations of a split, and checks that they belong to the question file.

    Args:
        folder: folder of the benchmark.
        split: name of the split.
        ids: question ids of the split by image and question.

    Returns:
        The questions in the order of the annotations.
    """
    path = layout.file(folder / "coco" / f"coco_pope_{split}.json", _SOURCE)
    rows = [(_key(row, place), _label(row, place)) for place, row in read_json_lines(path)]
    unknown_keys = [key for key, _ in rows if key not in ids]
    if unknown_keys or len(rows) != len(ids):
        example = (
            f", such as {unknown_keys[0][1]!r} of {unknown_keys[0][0]}" if unknown_keys else ""
        )
        raise UserError(
            f"{path}: its {len(rows):,} rows are not the {len(ids):,} questions of {split} in "
            f"{QUESTIONS}{example}: another version; get the file from {_SOURCE}"
        )
    return [_Question(ids[key], split, label) for key, label in rows]


def _label(row: dict[str, object], place: str) -> bool:
    """Returns whether the object is present. Raises for labels other than "yes" and "no"."""
    return field(row, "label", place, ("yes", "no").__contains__, '"yes" or "no"') == "yes"


def _key(row: dict[str, object], place: str) -> tuple[str, str]:
    """Returns the image and the question without the request for a short answer."""
    question = words(row, "text", place).partition("\n")[0].strip()
    return words(row, "image", place), question


BENCHMARK = Benchmark(
    name="pope",
    title="POPE",
    headline="100 x mean F1 of the three splits",
    question_files=(f"pope/{QUESTIONS}",),
    images="pope/val2014",
    image_source="val2014.zip at https://cocodataset.org/#download",
    max_new_tokens=128,
    score=score,
    options={"join": JOINS},
    make_grader=_make_grader,
)
