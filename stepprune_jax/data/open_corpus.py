"""Opens a training file as a `Corpus` of its usable rows, and reports the skipped rows."""

from collections.abc import Callable

import numpy as np
from jaxtyping import Bool, Int

from stepprune_jax.data.corpus import Corpus, LengthLimits
from stepprune_jax.data.encoding import ConversationEncoder
from stepprune_jax.data.image_files import (
    MISSING,
    OUTSIDE,
    PRESENT,
    ImageFolder,
    ImagePathError,
)
from stepprune_jax.data.index import (
    MALFORMED,
    NO_ANSWER,
    NO_TURNS,
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
    log: Callable[[str], object],
) -> Corpus:
    """Reads a training file, and reports its contents and its skipped rows.

    Text-only samples are skipped, because they have nothing to prune. The existence of images is
    checked before any text is tokenised. Token counts are cached in `source.index_folder`, so the
    next run with this file and tokenizer starts at once.

    Args:
        source: the training file and its folders.
        encoder: the model's encoder of conversations.
        limits: limits on the length of a row.
        identity: hash of the training file's contents.
        log: receives the lines of the report.

    Returns:
        The usable rows.

    Raises:
        FileNotFoundError: an image is missing, and `source.data.missing` is "stop".
        ValueError: a sample is unusable, and `source.data.unusable` is "stop"; an image link leads
            out of its folder; or no row is usable.
    """
    encoder.check()
    split_turns, skip_malformed = source.data.split_turns, source.data.unusable == "skip"
    folder = ImageFolder(source.image_root, source.linked_folders)
    path = index_path(source.index_folder, identity, encoder, split_turns, limits.ids)
    entries = read_json_list(source.file, "sample")
    samples, cached = Samples(source.file, entries, encoder.conversation), load_index(path)
    index = cached or scan(samples, split_turns, skip_malformed)
    _refuse_unusable(index, samples, source, limits)
    is_missing = _find_missing(index, samples, source, folder)
    if cached is None:
        index = measure(index, samples, encoder, limits.ids)
        save_index(index, path)
        _refuse_unusable(index, samples, source, limits)
    usable = np.flatnonzero((index.problem == USABLE) & ~is_missing)
    for line in _report(index, is_missing, samples, split_turns, limits):
        log(line)
    if not len(usable):
        raise UserError(f"{source.file}: expected a sample with an image and an answer, got none")
    corpus = Corpus(
        index,
        usable,
        samples=samples,
        root=source.image_root,
        encoder=encoder,
        limits=limits,
    )
    for line in _report_lengths(index, usable, corpus, limits):
        log(line)
    return corpus


def _refuse_unusable(index: Index, samples: Samples, source: Source, limits: LengthLimits) -> None:
    """Raises for the first unusable row if `source.data.unusable` is "stop"."""
    unusable = np.flatnonzero((index.problem == MALFORMED) | (index.problem == NO_ANSWER))
    if source.data.unusable == "stop" and len(unusable):
        raise UserError(_explain(index, int(unusable[0]), samples, limits))


def _explain(index: Index, row: int, samples: Samples, limits: LengthLimits) -> str:
    """Returns the message about a `MALFORMED` or `NO_ANSWER` row."""
    sample = int(index.sample[row])
    if index.problem[row] == MALFORMED:
        try:
            samples.parse(sample)
        except UserError as error:
            return str(error)
    return (
        f"{samples.place(sample)}: no answer within the first {limits.context} embeddings, "
        "which data.context_limit allows"
    )


def _find_missing(
    index: Index, samples: Samples, source: Source, folder: ImageFolder
) -> Bool[np.ndarray, " r"]:
    """Returns which rows lack their image file.

    Raises:
        FileNotFoundError: an image is missing, and `source.data.missing` is "stop".
        ImagePathError: a link leads out of the image folder.
    """
    state = folder.check(index.names)
    # Rows without an image have the index -1, which selects the appended entry.
    row_state = np.append(state, PRESENT)[index.image]
    outside, is_missing = np.flatnonzero(row_state == OUTSIDE), row_state == MISSING
    if len(outside):
        place, name = _locate_image(index, int(outside[0]), samples)
        raise ImagePathError(
            f'{place}: "image": {name} is a link that leads out of {source.image_root}; if this is '
            "intended, add its target folder to config.data.linked_folders"
        )
    if source.data.missing == "stop" and is_missing.any():
        place, name = _locate_image(index, int(np.argmax(is_missing)), samples)
        num_more = np.count_nonzero(state == MISSING) - 1
        more = f", and {num_more:,} more images are missing" if num_more else ""
        raise FileNotFoundError(
            f'{place}: "image": no file, or an empty one, at {source.image_root / name}{more}; '
            "config.data.missing = 'skip' skips such samples"
        )
    return is_missing


def _locate_image(index: Index, row: int, samples: Samples) -> tuple[str, str]:
    """Returns the place of a row in its file, and the name of its image."""
    return samples.place(int(index.sample[row])), index.names[index.image[row]]


def _report(
    index: Index,
    is_missing: Bool[np.ndarray, " r"],
    samples: Samples,
    split_turns: bool,
    limits: LengthLimits,
) -> list[str]:
    """Returns one line about the file's contents, and one line for each reason of skipped rows."""
    questions = f", {len(index.sample):,} questions" if split_turns else ""
    num_samples, num_images = len(samples.entries), len(index.names)
    lines = [f"{samples.file}: {num_samples:,} samples{questions}, {num_images:,} images"]

    def add_line(
        is_skipped: np.ndarray, reason: str, describe: Callable[[int], str] | None = None
    ) -> None:
        rows = np.flatnonzero(is_skipped)
        if len(rows):
            example = f"; the first: {describe(int(rows[0]))}" if describe else ""
            lines.append(f"  {len(rows):,} skipped: {reason}{example}")

    def describe_image(row: int) -> str:
        place, name = _locate_image(index, row, samples)
        return f"{place}, {name}"

    def explain(row: int) -> str:
        return _explain(index, row, samples, limits)

    add_line(index.problem == TEXT_ONLY, "text only, nothing to prune")
    add_line(index.problem == NO_TURNS, "only a first message of the assistant")
    add_line(is_missing, "the image is missing", describe_image)
    add_line(index.problem == MALFORMED, "malformed", explain)
    add_line((index.problem == NO_ANSWER) & ~is_missing, "no answer within the context", explain)
    return lines


def _report_lengths(
    index: Index, usable: Int[np.ndarray, " u"], corpus: Corpus, limits: LengthLimits
) -> list[str]:
    """Returns lines about the number and the lengths of the usable rows."""
    lengths = corpus.lengths

    def summarize(name: str, counts: np.ndarray, num_truncated: int = 0, limit: int = 0) -> str:
        median, percentile_95 = np.quantile(counts, (0.5, 0.95), method="lower")
        truncated = f"; {num_truncated:,} truncated to {limit:,}" if num_truncated else ""
        return (
            f"  {name}: median {median:,}, 95 % {percentile_95:,}, "
            f"longest {counts.max():,}{truncated}"
        )

    num_long_rows = int(np.count_nonzero(index.ids[usable] > limits.ids))
    num_long_texts = int(np.count_nonzero(index.text[usable] > limits.policy_text))
    num_targets = int(lengths.targets.sum(dtype=np.int64))
    return [
        f"  {len(usable):,} rows to train on, {num_targets:,} supervised tokens",
        summarize(
            f"embeddings, {limits.image_tokens:,} of them visual",
            lengths.ids + limits.image_tokens - 1,
            num_long_rows,
            limits.context,
        ),
        summarize("supervised tokens", lengths.targets),
        summarize("the user's words", lengths.text, num_long_texts, limits.policy_text),
    ]
