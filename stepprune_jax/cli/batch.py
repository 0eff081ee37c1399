"""A file of questions from the command line: `stepprune-generate --questions in.jsonl --out ...`.

Every line of the result says how it was made; the same command continues after an interruption.
"""

import itertools
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from tqdm import tqdm

from stepprune_jax.benchmarks.answer_files import append, recover
from stepprune_jax.data.json_files import JsonObject
from stepprune_jax.data.llava import Question
from stepprune_jax.inference.dataset import Batching, milliseconds
from stepprune_jax.inference.decoding import NotFiniteError, listed
from stepprune_jax.inference.encode import WIDTHS, chunk_size, encode_questions
from stepprune_jax.inference.generate import Generator
from stepprune_jax.parallel.placement import mesh_of, row_count
from stepprune_jax.user_input import require


def unanswered(
    out: Path, questions: Sequence[Question], folder: Path, about: Mapping[str, object]
) -> dict[int, Question]:
    """Returns questions that a file lacks, by number, and removes a last line that was cut off.

    Raises:
        ValueError: a line is about another question, or was made in another way.
    """
    asked, done = {q.question_id: (_image(q, folder), q.text) for q in questions}, set()
    for line in recover(out):
        name = str(line["question_id"])
        differ = [key for key, value in about.items() if line.get(key) != value]
        for fits, problem in (
            (
                asked.get(name) == (line.get("image"), line["prompt"]),
                "is not one of --questions, or is about another image",
            ),
            (not differ, f"was answered with another {', '.join(differ)}"),
        ):
            require(fits, f"{out}: question {name!r} {problem}; give another --out")
        done.add(name)
    return {n: q for n, q in enumerate(questions) if q.question_id not in done}


def _image(question: Question, folder: Path) -> str:
    """Returns the name of a question's image in the image folder."""
    return question.image.relative_to(folder).as_posix()


def answer_file(
    generator: Generator,
    todo: Mapping[int, Question],
    folder: Path,
    out: Path,
    about: Mapping[str, object],
    batch_size: int,
) -> None:
    """Answers questions greedily and appends a line for each, chunk by chunk.

    Args:
        generator: model and pruner, how they are run, and the longest answer.
        todo: the questions by number.
        folder: folder of their images.
        out: the file of answers.
        about: what every line says of how it was made.
        batch_size: questions per batch, rounded up to the devices.

    Raises:
        ValueError: an image that the model cannot take; or, once all other answers are written,
            questions with logits that are not finite.
    """
    model = generator.model
    devices = row_count(mesh_of(model.params))
    size = -(-batch_size // devices) * devices
    chunk = min(chunk_size(model, size), 8 * size)  # what an interruption may lose
    interval, without_answer = 0.2 if sys.stderr.isatty() else 10, []
    with tqdm(total=len(todo), unit="question", mininterval=interval) as bar:
        for first in range(0, len(todo), chunk):
            part = dict(itertools.islice(todo.items(), first, first + chunk))
            lines = _answer(generator, part, folder, size)
            append(out, [line | about for line in lines])
            ids = {line["question_id"] for line in lines}
            without_answer += [q.question_id for q in part.values() if q.question_id not in ids]
            bar.update(len(part))
    problem = f"{listed('question', without_answer)}: {NotFiniteError.REASON}"
    require(not without_answer, f"{problem}. All other answers are in {out}")


def _answer(
    generator: Generator, questions: Mapping[int, Question], folder: Path, size: int
) -> list[JsonObject]:
    """Answers some questions, by number; leaves out those with logits that are not finite."""
    encoded = encode_questions(
        generator.model,
        [*questions.values()],
        batch_size=size,
        taps=generator.pruner.taps(generator.model.config),
        execution=generator.options.execution,
        numbers=[*questions],
        as_shown=True,
    )
    (answers,) = generator.answer_set(encoded, Batching(size, widths=WIDTHS), partial=True)
    return [
        {
            "question_id": question.question_id,
            "image": _image(question, folder),
            "prompt": question.text,
            "text": answers.texts[row],
            "visual_tokens": int(encoded.sizes[row]),
            "kept": int(answers.kept[row]),
            "kept_indices": answers.order[row].tolist(),
            "ms": milliseconds(answers.seconds[row]),
        }
        for row, question in enumerate(questions.values())
        if answers.finite[row]
    ]
