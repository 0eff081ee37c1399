"""From a training file to the rows that can be trained on, with a report of what is left out."""

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Bool, Int

from stepprune_jax.data.corpus import Corpus, Limits
from stepprune_jax.data.encoding import ConversationEncoder
from stepprune_jax.data.image_files import MISSING, OUTSIDE, ImageFolder, ImagePathError
from stepprune_jax.data.index import (
    MALFORMED,
    NO_ANSWER,
    NOTHING_SAID,
    TEXT_ONLY,
    USABLE,
    Index,
    index_path,
    load_index,
    measure,
    row_turns,
    save_index,
    scan,
)
from stepprune_jax.data.json_array import JsonEntries

REMEDIES = ("stop", "skip")


class Source(NamedTuple):
    """A training file, and what to do about mistakes in it.

    Attributes:
        file: JSON list as of `read_conversations`.
        image_root: folder that images are relative to.
        index_folder: where the counts of tokens are kept for the next run.
        split_turns: make every question with its answer a row of its own; see `index.scan`.
        missing: what to do about a missing image, of `REMEDIES`.
        unusable: what to do about a sample that cannot be trained on, of `REMEDIES`.
        linked_folders: folders that links in the image folder may lead to.
    """

    file: Path
    image_root: Path
    index_folder: Path
    split_turns: bool = False
    missing: str = "stop"
    unusable: str = "stop"
    linked_folders: tuple[str, ...] = ()


def open_corpus(
    source: Source,
    encoder: ConversationEncoder,
    limits: Limits,
    identity: str,
    say: Callable[[str], Any] = print,
) -> Corpus:
    """Reads a training file, and reports what it holds and what is left out.

    Samples of text alone are left out: there is nothing in them to prune. Images are looked for
    before anything is tokenised. Counts of tokens are kept in `source.index_folder`, so that the
    next run with this file and tokenizer begins at once.

    Args:
        source: the file, the images, and what to do about mistakes.
        encoder: the model's, with a fast tokenizer.
        limits: what rows are cut to.
        identity: hash of the file's contents.
        say: takes the lines of the report.

    Returns:
        The rows that can be trained on.

    Raises:
        FileNotFoundError: the file or the image folder is missing; or an image is, and `source`
            says to stop.
        ValueError: an image lies outside of the folder; a sample cannot be trained on, and
            `source` says to stop; or nothing is left. The message names file and sample.
    """
    encoder.check()
    folder = ImageFolder(source.image_root, source.linked_folders)
    path = index_path(source.index_folder, identity, encoder, source.split_turns, limits.ids)
    known = load_index(path)
    index = known or scan(source.file, source.split_turns, source.unusable == "skip")
    _refuse(index, source, limits)
    missing = _missing(index, source, folder)
    if known is None:
        index = measure(index, source.file, encoder, limits.ids)
        save_index(index, path)
        _refuse(index, source, limits)
    used = np.flatnonzero((index.problem == USABLE) & ~missing)
    for line in _report(index, missing, source, limits):
        say(line)
    if not len(used):
        raise ValueError(f"{source.file}: expected a sample with an image and an answer, got none")
    corpus = Corpus(index, used, source.file, source.image_root, encoder, limits)
    for line in _token_report(index, used, corpus, limits):
        say(line)
    return corpus


def _refuse(index: Index, source: Source, limits: Limits) -> None:
    """Stops at the first sample that cannot be trained on, if that is what to do."""
    bad = np.flatnonzero((index.problem == MALFORMED) | (index.problem == NO_ANSWER))
    if source.unusable == "stop" and len(bad):
        raise ValueError(_explain(index, int(bad[0]), source, limits))


def _explain(index: Index, row: int, source: Source, limits: Limits) -> str:
    """Why a row cannot be trained on."""
    sample = int(index.sample[row])
    if index.problem[row] == MALFORMED:
        try:
            row_turns(JsonEntries(source.file, index.start, index.end), sample, 0, 0)
        except ValueError as error:
            return str(error)
    return (
        f"{source.file}: sample {sample}: no answer within the first {limits.context} embeddings, "
        "which data.context_limit allows"
    )


def _missing(index: Index, source: Source, folder: ImageFolder) -> Bool[np.ndarray, " r"]:
    """Rows whose image is missing; refuses links that lead out of the folder."""
    state = folder.check(index.names)
    # A row without an image has -1, which is the number of the last entry.
    of_row = np.append(state, 0)[index.image]
    outside, missing = np.flatnonzero(of_row == OUTSIDE), of_row == MISSING
    if len(outside):
        where, name = _image(index, int(outside[0]), source)
        raise ImagePathError(
            f'{where}: "image": {name} is a link that leads out of {source.image_root}; if it is '
            "meant to, name the folder it leads to in config.data.linked_folders"
        )
    if source.missing == "stop" and missing.any():
        where, name = _image(index, int(np.argmax(missing)), source)
        count = np.count_nonzero(state == MISSING) - 1
        more = f", and {count:,} more images are missing" if count else ""
        raise FileNotFoundError(
            f'{where}: "image": no file, or an empty one, at {source.image_root / name}{more}; '
            "config.data.missing = 'skip' leaves such samples out"
        )
    return missing


def _image(index: Index, row: int, source: Source) -> tuple[str, str]:
    """Where a row stands, and the name of its image."""
    return f"{source.file}: sample {index.sample[row]}", index.names[index.image[row]]


def _report(index: Index, missing: np.ndarray, source: Source, limits: Limits) -> list[str]:
    """What the file holds and what is left out, a line each."""
    rows = f", {len(index.sample):,} questions" if source.split_turns else ""
    lines = [f"{source.file}: {len(index.start):,} samples{rows}, {len(index.names):,} images"]

    def left_out(bad: np.ndarray, why: str, first: Callable[[int], str] | None = None):
        at = np.flatnonzero(bad)
        if len(at):
            example = f"; the first: {first(int(at[0]))}" if first else ""
            lines.append(f"  {len(at):,} left out: {why}{example}")

    def image(row: int) -> str:
        where, name = _image(index, row, source)
        return f"{where}, {name}"

    def reason(row: int) -> str:
        return _explain(index, row, source, limits)

    left_out(index.problem == TEXT_ONLY, "text alone, nothing to prune")
    left_out(index.problem == NOTHING_SAID, "nothing but a first message of the assistant")
    left_out(missing, "the image is missing", image)
    left_out(index.problem == MALFORMED, "malformed", reason)
    left_out((index.problem == NO_ANSWER) & ~missing, "no answer within the context", reason)
    return lines


def _token_report(
    index: Index, used: Int[np.ndarray, " u"], corpus: Corpus, limits: Limits
) -> list[str]:
    """How long the rows are that can be trained on."""
    lengths = corpus.lengths

    def line(what: str, counts: np.ndarray, cut: int = 0, limit: int = 0) -> str:
        half, most = np.quantile(counts, (0.5, 0.95), method="lower")
        shortened = f"; {cut:,} cut to {limit:,}" if cut else ""
        return f"  {what}: median {half:,}, 95 % {most:,}, longest {counts.max():,}{shortened}"

    long = int(np.count_nonzero(index.ids[used] > limits.ids))
    wordy = int(np.count_nonzero(index.text[used] > limits.policy_text))
    total = int(lengths.targets.sum(dtype=np.int64))
    return [
        f"  {len(used):,} rows to train on, {total:,} supervised tokens",
        line(
            f"embeddings, {limits.image_tokens:,} of them visual",
            lengths.ids + limits.image_tokens - 1,
            long,
            limits.context,
        ),
        line("supervised tokens", lengths.targets),
        line("the user's words", lengths.text, wordy, limits.policy_text),
    ]
