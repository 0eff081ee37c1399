"""Answers of the frozen model to the training questions, for training without labels.

With `config.data.answers = "model"`, the reward of a subset of tokens is the probability of the
answer that the frozen model itself gives from all visual tokens. The training file then needs
images and questions, but no answers. Answers are generated once, before the first update, and are
stored in the folder of the run, so an interrupted run continues where it stopped.
"""

import json
import logging
from collections.abc import Callable, Sequence
from pathlib import Path

from tqdm import tqdm

from stepprune_jax.benchmarks.answer_files import append
from stepprune_jax.checkpoints.load import VLM
from stepprune_jax.data.corpus import Corpus
from stepprune_jax.data.json_files import JsonObject
from stepprune_jax.data.llava import Question
from stepprune_jax.inference.base import RunOptions
from stepprune_jax.inference.dataset import Batching
from stepprune_jax.inference.encode import encode_questions
from stepprune_jax.inference.generate import Generator
from stepprune_jax.parallel import distributed
from stepprune_jax.pruning import AllTokens
from stepprune_jax.training.settings import Run
from stepprune_jax.user_input import UserError

_LOG = logging.getLogger(__name__)

ANSWERS_FILE = "model_answers.jsonl"
# Batches whose answers are stored together: few enough that an interruption loses little work, and
# enough that questions about one image share its features.
_BATCHES_PER_CHUNK = 16

# Answers by the index of the sample in the training file and of the question in the sample.
ModelAnswers = dict[tuple[int, int], str]


def generate_answers(
    run: Run,
    model: VLM,
    corpus: Corpus,
    *,
    file: Path,
    origin: JsonObject,
    should_stop: Callable[[], bool],
) -> ModelAnswers | None:
    """Answers every training question greedily with all visual tokens.

    Answers that `file` already has are not generated again. All processes must call this.

    Args:
        run: settings of the run.
        model: the frozen model.
        corpus: the training rows, each with one question.
        file: JSON lines with the answers; created if missing.
        origin: what the answers depend on, the first line of the file. A file of another origin is
            replaced.
        should_stop: whether to stop after the current chunk of questions.

    Returns:
        The answers; None if `should_stop` returned True. With `data.missing` = "skip", a question
        whose image cannot be read has the answer "".

    Raises:
        FileNotFoundError, UserError: an image cannot be read, and `data.missing` is "stop".
    """
    answers = distributed.main_first(lambda: _read_file(file, origin))
    questions = [corpus.question(row) for row in range(len(corpus))]
    unanswered = [question for question in questions if _key(question) not in answers]
    distributed.say(
        f"Answering {len(unanswered):,} of {len(questions):,} training questions with all visual "
        f"tokens, at most {run.data.answer_tokens} tokens each: {file}"
    )
    # A video may have many times the tokens of an image, so few videos are encoded at once.
    has_videos = any(question.video is not None for question in unanswered)
    chunk_size = run.batch_size * (1 if has_videos else _BATCHES_PER_CHUNK)
    is_hidden = None if distributed.is_main() else True  # None hides the bar without a terminal
    with tqdm(total=len(unanswered), desc="answers", unit="question", disable=is_hidden) as bar:
        for first in range(0, len(unanswered), chunk_size):
            if should_stop():
                return None
            chunk = unanswered[first : first + chunk_size]
            texts = _answer_readable(run, model, chunk)
            keys = [_key(question) for question in chunk]
            answers.update(zip(keys, texts, strict=True))
            if distributed.is_main():
                append(
                    file,
                    (
                        {"sample": sample, "question": question, "answer": text}
                        for (sample, question), text in zip(keys, texts, strict=True)
                    ),
                )
            bar.update(len(chunk))
    num_empty = sum(not text for text in answers.values())
    if num_empty:
        distributed.say(f"{num_empty:,} questions have an empty answer, and are left out")
    return answers


def _answer_readable(run: Run, model: VLM, questions: Sequence[Question]) -> list[str]:
    """Answers some questions; see `generate_answers` for images that cannot be read.

    A chunk with such an image is halved until the image is alone.
    """
    try:
        return _answer_chunk(run, model, questions)
    except (FileNotFoundError, MemoryError, UserError) as error:
        if run.data.missing == "stop":
            raise
        if len(questions) == 1:
            _LOG.warning("%s; skipped", error)
            return [""]
    middle = len(questions) // 2
    halves = questions[:middle], questions[middle:]
    return [text for half in halves for text in _answer_readable(run, model, half)]


def _answer_chunk(run: Run, model: VLM, questions: Sequence[Question]) -> list[str]:
    """Answers some questions with all visual tokens.

    Args:
        run: settings of the run.
        model: the frozen model.
        questions: the questions.

    Returns:
        One text per question, without blanks at its ends.
    """
    execution = run.model.execution
    encoded = encode_questions(model, questions, batch_size=run.batch_size, execution=execution)
    options = RunOptions(run.data.answer_tokens, execution=execution)
    generator = Generator(model, AllTokens(), options=options)
    (answers,) = generator.answer_set(encoded, Batching(run.batch_size))
    return [text.strip() for text in answers.texts]


def _key(question: Question) -> tuple[int, int]:
    """Returns the indices of a question's sample and of the question in the sample."""
    sample, pair = question.question_id.split("/")
    return int(sample), int(pair)


def _read_file(file: Path, origin: JsonObject) -> ModelAnswers:
    """Reads the answers of an interrupted run.

    Args:
        file: JSON lines with the answers.
        origin: expected first line of the file. A missing file, or a file with another first line,
            is replaced by a file with only this line.

    Returns:
        The answers. An incomplete last line is removed from the file.
    """
    data = file.read_bytes() if file.exists() else b""
    complete_data = data[: data.rfind(b"\n") + 1]
    first_line, *lines = [json.loads(line) for line in complete_data.splitlines()] or [None]
    if distributed.is_main():
        if first_line != origin:
            file.unlink(missing_ok=True)
            append(file, [origin])
        elif complete_data != data:
            with file.open("r+b") as stream:
                stream.truncate(len(complete_data))
    if first_line != origin:
        return {}
    return {(line["sample"], line["question"]): line["answer"] for line in lines}
