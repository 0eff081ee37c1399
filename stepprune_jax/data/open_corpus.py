"""From a training file to its usable rows, with a report of skipped ones."""

from collections.abc import Callable

import numpy as np
from jaxtyping import Bool, Int

from stepprune_jax.data.corpus import Corpus, LengthLimits
from stepprune_jax.data.encoding import ConversationEncoder
from stepprune_jax.data.image_files import MISSING, OUTSIDE, ImageFolder, ImagePathError
from stepprune_jax.data.index import (
    MALFORMED,
    NO_ANSWER,
    NOTHING_SAID,
    TEXT_ONLY,
    USABLE,
    Index,
    Samples,
    index_path,
    load_index,
    measure,
    save_index,
    scan,
)
from stepprune_jax.data.json_files import read_json_list
from stepprune_jax.data.source import Source
from stepprune_jax.user_input import UserError


def open_corpus(
    source: Source,
    encoder: ConversationEncoder,
    limits: LengthLimits,
    identity: str,
    say: Callable[[str], object],
) -> Corpus:
    """Reads a training file, and reports its contents and skipped rows.

    Text-only samples are skipped, as there is nothing to prune. The existence of images is checked
    before anything is tokenised. Token counts are cached in `source.index_folder`, so that the next
    run with this file and tokenizer starts at once.
    """
    encoder.check()
    split_turns, skip = source.data.split_turns, source.data.unusable == "skip"
    folder = ImageFolder(source.image_root, source.linked_folders)
    path = index_path(source.index_folder, identity, encoder, split_turns, limits.ids)
    entries = read_json_list(source.file, "sample")
    samples, known = Samples(source.file, entries, encoder.conversation), load_index(path)
    index = known or scan(samples, split_turns, skip)
    _refuse(index, samples, source, limits)
    missing = _missing(index, samples, source, folder)
    if known is None:
        index = measure(index, samples, encoder, limits.ids)
        save_index(index, path)
        _refuse(index, samples, source, limits)
    used = np.flatnonzero((index.problem == USABLE) & ~missing)
    for line in _report(index, missing, samples, split_turns, limits):
        say(line)
    if not len(used):
        raise UserError(f"{source.file}: expected a sample with an image and an answer, got none")
    corpus = Corpus(index, used, samples, source.image_root, encoder, limits)
    for line in _token_report(index, used, corpus, limits):
        say(line)
    return corpus


def _refuse(index: Index, samples: Samples, source: Source, limits: LengthLimits) -> None:
    """Raises for the first unusable sample, if requested."""
    bad = np.flatnonzero((index.problem == MALFORMED) | (index.problem == NO_ANSWER))
    if source.data.unusable == "stop" and len(bad):
        raise UserError(_explain(index, int(bad[0]), samples, limits))


def _explain(index: Index, row: int, samples: Samples, limits: LengthLimits) -> str:
    """Returns the reason why a row is unusable."""
    sample = int(index.sample[row])
    if index.problem[row] == MALFORMED:
        try:
            samples.parse(sample)
        except UserError as error:
            return str(error)
    return (
        f"{samples.where(sample)}: no answer within the first {limits.context} embeddings, "
        "which data.context_limit allows"
    )


def _missing(
    index: Index, samples: Samples, source: Source, folder: ImageFolder
) -> Bool[np.ndarray, " r"]:
    """Returns rows whose image is missing; raises for links that lead out of the folder."""
    state = folder.check(index.names)
    # A row without an image has -1, which is the number of the last entry.
    of_row = np.append(state, 0)[index.image]
    outside, missing = np.flatnonzero(of_row == OUTSIDE), of_row == MISSING
    if len(outside):
        where, name = _image(index, int(outside[0]), samples)
        raise ImagePathError(
            f'{where}: "image": {name} is a link that leads out of {source.image_root}; if this is '
            "intended, add its target folder to config.data.linked_folders"
        )
    if source.data.missing == "stop" and missing.any():
        where, name = _image(index, int(np.argmax(missing)), samples)
        count = np.count_nonzero(state == MISSING) - 1
        more = f", and {count:,} more images are missing" if count else ""
        raise FileNotFoundError(
            f'{where}: "image": no file, or an empty one, at {source.image_root / name}{more}; '
            "config.data.missing = 'skip' skips such samples"
        )
    return missing


def _image(index: Index, row: int, samples: Samples) -> tuple[str, str]:
    """Returns the place of a row in its file, and the name of its image."""
    return samples.where(int(index.sample[row])), index.names[index.image[row]]


def _report(
    index: Index, missing: np.ndarray, samples: Samples, split_turns: bool, limits: LengthLimits
) -> list[str]:
    """Reports the file's contents and skipped rows, one line each."""
    rows = f", {len(index.sample):,} questions" if split_turns else ""
    count, images = len(samples.entries), len(index.names)
    lines = [f"{samples.file}: {count:,} samples{rows}, {images:,} images"]

    def skipped(bad: np.ndarray, why: str, first: Callable[[int], str] | None = None):
        at = np.flatnonzero(bad)
        if len(at):
            example = f"; the first: {first(int(at[0]))}" if first else ""
            lines.append(f"  {len(at):,} skipped: {why}{example}")

    def image(row: int) -> str:
        where, name = _image(index, row, samples)
        return f"{where}, {name}"

    def reason(row: int) -> str:
        return _explain(index, row, samples, limits)

    skipped(index.problem == TEXT_ONLY, "text only, nothing to prune")
    skipped(index.problem == NOTHING_SAID, "only a first message of the assistant")
    skipped(missing, "the image is missing", image)
    skipped(index.problem == MALFORMED, "malformed", reason)
    skipped((index.problem == NO_ANSWER) & ~missing, "no answer within the context", reason)
    return lines


def _token_report(
    index: Index, used: Int[np.ndarray, " u"], corpus: Corpus, limits: LengthLimits
) -> list[str]:
    """Reports the lengths of the usable rows."""
    lengths = corpus.lengths

    def line(what: str, counts: np.ndarray, cut: int = 0, limit: int = 0) -> str:
        half, most = np.quantile(counts, (0.5, 0.95), method="lower")
        shortened = f"; {cut:,} truncated to {limit:,}" if cut else ""
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
