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
from stepprune_jax.inference.encode import WIDTHS, chunk_size, encode_questions
from stepprune_jax.inference.generate import Generator
from stepprune_jax.inference.sets import Batching, milliseconds
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
        ValueError: an image that the model cannot take.
    """
    model = generator.model
    devices = row_count(mesh_of(model.params))
    size = -(-batch_size // devices) * devices
    chunk = min(chunk_size(model, size), 8 * size)  # what an interruption may lose
    interval = 0.2 if sys.stderr.isatty() else 10
    with tqdm(total=len(todo), unit="question", mininterval=interval) as bar:
        for first in range(0, len(todo), chunk):
            part = dict(itertools.islice(todo.items(), first, first + chunk))
            lines = _answer(generator, part, folder, size)
            append(out, [line | about for line in lines])
            bar.update(len(part))


def _answer(
    generator: Generator, questions: Mapping[int, Question], folder: Path, size: int
) -> list[JsonObject]:
    """Answers some questions, by number."""
    encoded = encode_questions(
        generator.model,
        [*questions.values()],
        batch_size=size,
        taps=generator.pruner.taps(generator.model.config),
        execution=generator.options.execution,
        numbers=[*questions],
        as_shown=True,
    )
    (answers,) = generator.answer_set(encoded, Batching(size, widths=WIDTHS))
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
    ]
