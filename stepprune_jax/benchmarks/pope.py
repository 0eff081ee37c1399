"""POPE: yes-or-no questions about the presence of objects, in three splits.

The splits differ in how absent objects were chosen. The official program matches answers and labels
by their position in the files. Here both are matched by question. The figures of the official
matching are also reported.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import NamedTuple

from stepprune_jax.benchmarks import layout
from stepprune_jax.benchmarks.answers import GivenAnswer, latest_answers, read_answers
from stepprune_jax.benchmarks.benchmark import Benchmark, Score, grade_by_id
from stepprune_jax.data.json_files import JsonObject, field, identity, read_json_lines, words
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
_LABELS = ("yes", "no")  # whether the object is in the image
_NO = frozenset(("No", "no", "not"))


class _Question(NamedTuple):
    """A question of LLaVA's list with its label.

    Attributes:
        id: id of the question.
        split: name of the split, a key of `SPLITS`.
        label: whether the object is in the image.
    """

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
    """Returns whether POPE's program reads an answer as "yes".

    Only the text before the first full stop counts. Commas are deleted, and the text is split at
    single blanks. A word that is exactly `No`, `no` or `not` makes the answer a no. Every other
    answer is a yes, including the empty answer.
    """
    return _NO.isdisjoint(text.partition(".")[0].replace(",", "").split(" "))


def score(root: str | Path, answers: str | Path, *, join: str = "question") -> Score:
    """Scores answers to POPE.

    Args:
        root: folder of LLaVA's layout.
        answers: the answer file.
        join: "question" finds the label of an answer by its question id. "position" finds the label
            by the position of the answer among the answers of its split, as the official program
            does.

    Returns:
        The headline is 100 times the mean of the F1 scores of the three splits. Parts: accuracy,
        precision, recall, F1 and yes ratio of each split, the mean accuracy, the F1 over all
        splits, and under `by_position` the means of the official matching.
    """
    folder = Path(root) / "pope"
    lines = read_answers(answers)
    questions, warnings = _read_questions(folder)
    answer_of = latest_answers(lines, questions, warnings)
    by_question = _compute_parts(_join_by_question(answer_of, questions))
    by_position = _compute_parts(_join_by_position(lines, questions))
    if by_question != by_position:
        warnings.append(
            "the answers are not one for one in the order of the questions: by position, as the "
            f"official program joins them, the mean F1 is {by_position['mean_f1']:.2f}, by "
            f"question {by_question['mean_f1']:.2f}"
        )
    parts = {"question": by_question, "position": by_position}[join]
    position_means = {name: by_position[name] for name in _MEANS}
    counts = {"questions": len(questions), "answered": len(answer_of)}
    return Score(parts["mean_f1"], {**parts, "by_position": position_means, **counts}, warnings)


def _make_grader(root: Path) -> Callable[[GivenAnswer], float | None]:
    """Grades an answer as right or wrong; see `Benchmark.make_grader`."""
    questions, _ = _read_questions(Path(root) / "pope")
    return grade_by_id(questions, lambda text, question: says_yes(text) == question.label)


def read_splits(root: str | Path) -> dict[str, str]:
    """Returns the split of each question by id. `root` is the folder of LLaVA's layout."""
    questions, _ = _read_questions(Path(root) / "pope")
    return {question_id: question.split for question_id, question in questions.items()}


def _percent(count: int, total: int) -> float:
    """Returns a fraction in percent; 0 if the total is 0."""
    return 100 * count / total if total else 0.0


def _count_outcomes(pairs: Iterable[tuple[bool, bool]]) -> Counts:
    """Counts pairs (prediction, label) by outcome."""
    pairs = list(pairs)
    return Counts(
        tp=pairs.count((True, True)),
        fp=pairs.count((True, False)),
        tn=pairs.count((False, False)),
        fn=pairs.count((False, True)),
    )


def _join_by_question(
    answer_of: dict[str, GivenAnswer], questions: dict[str, _Question]
) -> dict[str, Counts]:
    """Compares each answer with the label of its question.

    Args:
        answer_of: answers by question id.
        questions: questions by id.

    Returns:
        Numbers of outcomes by split.
    """
    pairs_by_split = defaultdict(list)
    for question_id, answer in answer_of.items():
        question = questions[question_id]
        pairs_by_split[question.split].append((says_yes(answer.text), question.label))
    return {split: _count_outcomes(pairs_by_split[split]) for split in SPLITS}


def _join_by_position(
    lines: list[GivenAnswer], questions: dict[str, _Question]
) -> dict[str, Counts]:
    """Compares the n-th answer of each split with the n-th label, as the official program does.

    Args:
        lines: answers in the order of the file. Answers to unknown questions are skipped.
        questions: questions by id, in the order of the labels.

    Returns:
        Numbers of outcomes by split.
    """
    predictions, labels = defaultdict(list), defaultdict(list)
    for line in lines:
        if line.id in questions:
            predictions[questions[line.id].split].append(says_yes(line.text))
    for question in questions.values():
        labels[question.split].append(question.label)
    # As in the official program, answers beyond the last label are dropped.
    return {
        split: _count_outcomes(zip(predictions[split], labels[split], strict=False))
        for split in SPLITS
    }


def _compute_parts(counts: dict[str, Counts]) -> JsonObject:
    """Computes the figures of each split, their means, and the F1 over all splits.

    Args:
        counts: numbers of outcomes by split.

    Raises:
        UserError: a split has no answers.
    """
    for split, split_counts in counts.items():
        if not sum(split_counts):
            raise UserError(f"no answer to a question of split {split} of {QUESTIONS}")
    figures = {split: split_counts.figures() for split, split_counts in counts.items()}
    pooled_counts = Counts(*(sum(column) for column in zip(*counts.values(), strict=True)))
    return {
        "mean_f1": sum(f["f1"] for f in figures.values()) / len(figures),
        "mean_accuracy": sum(f["accuracy"] for f in figures.values()) / len(figures),
        "pooled_f1": pooled_counts.figures()["f1"],
        **figures,
    }


def _read_questions(folder: Path) -> tuple[dict[str, _Question], list[str]]:
    """Reads the question file, and joins each question with its label in the annotations.

    Args:
        folder: folder of the benchmark.

    Returns:
        The questions by id in the order of the annotations, and warnings about splits of another
        size than published.
    """
    path = layout.require_file(folder / QUESTIONS, "LLaVA's eval.zip")
    ids_by_split: dict[str, dict[tuple[str, str], str]] = {split: {} for split in SPLITS}
    seen_ids: set[str] = set()
    for place, record in read_json_lines(path):
        split = field(record, "category", place, SPLITS.__contains__, f"one of {', '.join(SPLITS)}")
        question_id = identity(record, "question_id", place)
        if question_id in seen_ids:
            raise UserError(
                f'{place}: "question_id" {question_id!r} is also the id of another question'
            )
        seen_ids.add(question_id)
        ids_by_split[split][_question_key(record, place)] = question_id
    warnings, questions = [], {}
    for split, published_size in SPLITS.items():
        ids = ids_by_split[split]
        warnings += layout.size_warnings(f"{path.name}, {split}", len(ids), published_size)
        for question in _read_labels(folder, split, ids):
            questions[question.id] = question
    return questions, warnings


def _read_labels(folder: Path, split: str, ids: dict[tuple[str, str], str]) -> list[_Question]:
    """Reads the annotations of a split, and checks that they belong to the question file.

    Args:
        folder: folder of the benchmark.
        split: name of the split.
        ids: question id by (image, question) for each question of the split.

    Returns:
        The questions in the order of the annotations.

    Raises:
        UserError: the annotations have other questions than the question file.
    """
    path = layout.require_file(folder / "coco" / f"coco_pope_{split}.json", _SOURCE)
    labels = []
    for place, record in read_json_lines(path):
        label = field(record, "label", place, _LABELS.__contains__, '"yes" or "no"')
        labels.append((_question_key(record, place), label))
    unknown_keys = [key for key, _ in labels if key not in ids]
    if unknown_keys or len(labels) != len(ids):
        example = "".join(f", such as {text!r} of {image}" for image, text in unknown_keys[:1])
        raise UserError(
            f"{path}: its {len(labels):,} rows are not the {len(ids):,} questions of {split} in "
            f"{QUESTIONS}{example}: another version; get the file from {_SOURCE}"
        )
    return [_Question(ids[key], split, label == "yes") for key, label in labels]


def _question_key(record: JsonObject, place: str) -> tuple[str, str]:
    """Returns the image and the question without the request for a short answer."""
    question = words(record, "text", place).partition("\n")[0].strip()
    return words(record, "image", place), question


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
