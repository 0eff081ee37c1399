"""Answers a file of questions: `stepprune-generate --questions in.jsonl --out answers.jsonl`.

Every line of the answer file has the settings that produced the answer. The same command continues
after an interruption.
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
from stepprune_jax.user_input import UserError

_CHUNK_BATCHES = 8  # Batches between two writes of the file. An interruption loses at most these.


def unanswered_questions(
    out: Path, questions: Sequence[Question], folder: Path, provenance: Mapping[str, object]
) -> dict[int, Question]:
    """Returns the questions without an answer in a file.

    A truncated last line of the file, which an interruption left, is removed.

    Args:
        out: the answer file.
        questions: all questions.
        folder: the image folder.
        provenance: the settings of this run, as in each line of the file.

    Returns:
        Each question without an answer, by its number in `questions`.

    Raises:
        UserError: a line has another question or other settings.
    """
    expected_lines = {
        question.question_id: (_image_name(question, folder), question.text)
        for question in questions
    }
    answered_ids = set()
    for line in recover(out):
        name = str(line["question_id"])
        changed_fields = [key for key, value in provenance.items() if line.get(key) != value]
        problem = None
        if expected_lines.get(name) != (line.get("image"), line["prompt"]):
            problem = "is not one of --questions, or is about another image"
        elif changed_fields:
            problem = f"was answered with another {', '.join(changed_fields)}"
        if problem:
            raise UserError(f"{out}: question {name!r} {problem}; give another --out")
        answered_ids.add(name)
    return {
        number: question
        for number, question in enumerate(questions)
        if question.question_id not in answered_ids
    }


def _image_name(question: Question, folder: Path) -> str:
    """Returns the path of a question's image relative to the image folder."""
    return question.image.relative_to(folder).as_posix()


def answer_file(
    generator: Generator,
    questions: Mapping[int, Question],
    *,
    folder: Path,
    out: Path,
    provenance: Mapping[str, object],
    batch_size: int,
) -> None:
    """Answers questions greedily and appends one line for each question, chunk by chunk.

    Args:
        generator: model, pruner and settings of the answers.
        questions: the questions by number.
        folder: folder of the images.
        out: the answer file.
        provenance: the settings of this run, which every line repeats.
        batch_size: questions per batch, rounded up to a multiple of the number of devices.

    Raises:
        UserError: the model cannot read an image, or the logits of questions are not finite. In the
            second case, all other answers are written first.
    """
    model = generator.model
    devices = row_count(mesh_of(model.params))
    padded_batch = -(-batch_size // devices) * devices
    chunk_questions = min(chunk_size(model, padded_batch), _CHUNK_BATCHES * padded_batch)
    interval, failed_ids = 0.2 if sys.stderr.isatty() else 10, []
    with tqdm(total=len(questions), unit="question", mininterval=interval) as bar:
        for start in range(0, len(questions), chunk_questions):
            chunk = dict(itertools.islice(questions.items(), start, start + chunk_questions))
            lines = _answer_chunk(generator, chunk, folder, padded_batch)
            append(out, [line | provenance for line in lines])
            ids = {line["question_id"] for line in lines}
            failed_ids += [
                question.question_id
                for question in chunk.values()
                if question.question_id not in ids
            ]
            bar.update(len(chunk))
    if failed_ids:
        problem = f"{listed('question', failed_ids)}: {NotFiniteError.REASON}"
        raise UserError(f"{problem}. All other answers are in {out}")


def _answer_chunk(
    generator: Generator, questions: Mapping[int, Question], folder: Path, batch_size: int
) -> list[JsonObject]:
    """Returns the lines of questions, without the questions whose logits are not finite."""
    encoded = encode_questions(
        generator.model,
        [*questions.values()],
        batch_size=batch_size,
        taps=generator.pruner.taps(generator.model.config),
        execution=generator.options.execution,
        numbers=[*questions],
        as_shown=True,
    )
    (answers,) = generator.answer_set(encoded, Batching(batch_size, widths=WIDTHS), partial=True)
    return [
        {
            "question_id": question.question_id,
            "image": _image_name(question, folder),
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
