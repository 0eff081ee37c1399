"""Answers a file of questions: `stepprune-generate --questions in.jsonl --out answers.jsonl`.

Every line of the answer file has the settings that produced the answer. The same command continues
after an interruption.
"""

import itertools
import math
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

# Number of batches between two writes of the answer file. An interruption loses at most the answers
# of these batches.
_CHUNK_BATCHES = 8


def unanswered_questions(
    out: Path, questions: Sequence[Question], folder: Path, provenance: Mapping[str, object]
) -> dict[int, Question]:
    """Returns the questions that an answer file does not yet answer.

    An interruption may have truncated the last line of the file. Such a line is removed.

    Args:
        out: the answer file, which may not exist yet.
        questions: all questions.
        folder: folder of the images. Lines of the file have relative image paths.
        provenance: the settings of this run, which every line of the file must have.

    Returns:
        The unanswered questions. The key of a question is its index in `questions`.

    Raises:
        UserError: a line answers another question, or was written with other settings.
    """
    image_and_text = {
        question.question_id: (_image_name(question, folder), question.text)
        for question in questions
    }
    answered_ids = set()
    for line in recover(out):
        question_id, problem = str(line["question_id"]), ""
        changed_settings = [name for name, value in provenance.items() if line.get(name) != value]
        if changed_settings:
            problem = f"was answered with another {', '.join(changed_settings)}"
        if image_and_text.get(question_id) != (line.get("image"), line["prompt"]):
            problem = "is not one of --questions, or is about another image"
        if problem:
            raise UserError(f"{out}: question {question_id!r} {problem}; give another --out")
        answered_ids.add(question_id)
    return {
        index: question
        for index, question in enumerate(questions)
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
    """Answers questions greedily, and appends one line per question to the answer file.

    Args:
        generator: model, pruner and settings of the answers.
        questions: result of `unanswered_questions`.
        folder: folder of the images.
        out: the answer file, written after each chunk of batches.
        provenance: the settings of this run, which every line repeats.
        batch_size: questions per batch, rounded up to a multiple of the number of devices.

    Raises:
        UserError: the model cannot read an image, or the logits of some questions are not finite.
            In the second case, all other answers are written first.
    """
    model = generator.model
    num_devices = row_count(mesh_of(model.params))
    padded_batch_size = math.ceil(batch_size / num_devices) * num_devices
    max_chunk_length = min(chunk_size(model, padded_batch_size), _CHUNK_BATCHES * padded_batch_size)
    update_seconds = 0.2 if sys.stderr.isatty() else 10  # A log file gets few progress lines.
    failed_ids = []
    with tqdm(total=len(questions), unit="question", mininterval=update_seconds) as progress_bar:
        for start in range(0, len(questions), max_chunk_length):
            chunk = dict(itertools.islice(questions.items(), start, start + max_chunk_length))
            lines = _answer_chunk(generator, chunk, folder, padded_batch_size)
            append(out, [{**line, **provenance} for line in lines])
            answered_ids = {line["question_id"] for line in lines}
            failed_ids += [
                question.question_id
                for question in chunk.values()
                if question.question_id not in answered_ids
            ]
            progress_bar.update(len(chunk))
    if failed_ids:
        problem = f"{listed('question', failed_ids)}: {NotFiniteError.REASON}"
        raise UserError(f"{problem}. All other answers are in {out}")


def _answer_chunk(
    generator: Generator, questions: Mapping[int, Question], folder: Path, batch_size: int
) -> list[JsonObject]:
    """Answers a chunk of questions.

    Args:
        generator: model, pruner and settings of the answers.
        questions: the chunk. Keys are the questions' indices in the file, for random pruners.
        folder: folder of the images.
        batch_size: questions per batch.

    Returns:
        One line of the answer file per question. Questions whose logits are not finite have none.
    """
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
