"""Opens a training file as a `Corpus` of its usable rows, and reports the skipped rows.

A row is one training example, see `index`. Embeddings are the inputs of the language model: one per
text token and one per visual token.
"""

from collections.abc import Callable

import numpy as np
from jaxtyping import Bool, Int

from stepprune_jax.data.clips import InspectFn, inspect_videos, video_stamps
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
    UNREADABLE,
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
from stepprune_jax.data.model_answers import answers_identity, replace_answers
from stepprune_jax.data.source import Source
from stepprune_jax.data.unknown_words import describe_unknown_words
from stepprune_jax.data.videos import NoVideosError
from stepprune_jax.user_input import UserError, naming


def open_corpus(
    source: Source,
    encoder: ConversationEncoder,
    limits: LengthLimits,
    identity: str,
    log: Callable[[str], object],
    *,
    inspect: InspectFn | None = None,
    processor: str = "",
) -> Corpus:
    """Reads a training file, and reports its contents and its skipped rows.

    Text-only samples are skipped, because they have nothing to prune. Missing images
    and unreadable videos are reported before any text is tokenized. Token counts are cached in
    `source.index_folder`, so the next run with this file and tokenizer starts at once.

    Args:
        source: the training file with its folders, and the answers that replace the file's.
        encoder: the model's encoder of conversations.
        limits: limits on the length of a row.
        identity: hash of the training file's contents.
        log: receives the lines of the report.
        inspect: reads the times and sizes of a video's frames; None for files without videos.
        processor: text that changes with the settings of the video processor.

    Returns:
        The usable rows.

    Raises:
        FileNotFoundError: an image is missing, and `source.data.missing` is "stop".
        NoVideosError: the model reads no videos, and a row has one.
        ValueError: a sample is unusable, and `source.data.unusable` is "stop"; an image link leads
            out of its folder; or no row is usable.
    """
    encoder.check()
    split_turns, skip_malformed = source.data.split_turns, source.data.unusable == "skip"
    entries = read_json_list(source.file, "sample")
    if source.answers is not None:
        entries = replace_answers(entries, source.answers)
        # The cached token counts depend on the answers.
        identity = f"{identity}-{answers_identity(source.answers)}"
    choices = split_turns, limits.ids, limits.context, *source.data.sampling, processor
    path = index_path(source.index_folder, identity, encoder, *choices)
    samples = Samples(source.file, entries, encoder.conversation)
    cached_index = load_index(path)
    if cached_index is not None and _has_stale_videos(cached_index, source):
        cached_index = None
    index = cached_index or scan(samples, split_turns, skip_malformed)
    _refuse_unusable(index, samples, source, limits)
    is_missing = _find_missing_images(index, samples, source)
    if cached_index is None:
        index = _read_videos(index, is_missing, samples, source, inspect)
        index = measure(index, samples, encoder, limits.max_ids)
        save_index(index, path)
        # The token counts also reveal rows whose answer starts after the context.
        _refuse_unusable(index, samples, source, limits)
    usable_rows = np.flatnonzero((index.problem == USABLE) & ~is_missing)
    for line in _report_skipped_rows(index, is_missing, samples, split_turns, limits):
        log(line)
    if not len(usable_rows):
        raise UserError(
            f"{source.file}: expected a sample with an image or a video and an answer, got none"
        )
    corpus = Corpus(
        index,
        usable_rows,
        samples=samples,
        root=source.image_root,
        encoder=encoder,
        limits=limits,
        sampling=source.data.sampling,
    )
    for line in _report_lengths(index, usable_rows, corpus, limits):
        log(line)
    # Lazy: texts are read only if the tokenizer has an unknown token.
    sample_indices = np.unique(index.sample[usable_rows]).tolist()
    texts = (text for sample_index in sample_indices for text in samples.parse(sample_index).turns)
    if warning := describe_unknown_words(encoder.tokenizer, texts):
        log(f"warning: {warning}")
    return corpus


def _has_stale_videos(index: Index, source: Source) -> bool:
    """Returns whether a cached index must be rebuilt: a video changed, or one was unreadable."""
    is_changed = np.any(video_stamps(index, source.image_root) != index.stamp)
    return bool(is_changed or np.any(index.problem == UNREADABLE))


def _read_videos(
    index: Index,
    is_missing: Bool[np.ndarray, " r"],
    samples: Samples,
    source: Source,
    inspect: InspectFn | None,
) -> Index:
    """Reads the shapes of all videos; see `inspect_videos`.

    Raises:
        NoVideosError: the model reads no videos, and a row has one.
        UserError: a video is unreadable, and `source.data.missing` is "stop".
    """
    # A row without an image has the image index -1, which selects the appended 0.
    video_rows = np.flatnonzero(np.append(index.is_video, 0)[index.image])
    if not len(video_rows):
        return index
    first_place, first_name = _locate_image(index, int(video_rows[0]), samples)
    if inspect is None:
        raise NoVideosError(f'{first_place}: "video" is {first_name!r}, expected images only')
    with naming(f'{first_place}: "video"', NoVideosError):
        index, errors = inspect_videos(
            index, is_missing, source.image_root, source.data.sampling, inspect
        )
    if errors and source.data.missing == "stop":
        row_index = int(np.flatnonzero(np.isin(index.image, list(errors)))[0])
        place, _ = _locate_image(index, row_index, samples)
        more = f", and {len(errors) - 1:,} more videos cannot be read" if len(errors) > 1 else ""
        raise UserError(
            f'{place}: "video": {errors[int(index.image[row_index])]}{more}; '
            "config.data.missing = 'skip' skips such samples"
        )
    return index


def _refuse_unusable(index: Index, samples: Samples, source: Source, limits: LengthLimits) -> None:
    """Raises for the first unusable row if `source.data.unusable` is "stop"."""
    unusable_rows = np.flatnonzero((index.problem == MALFORMED) | (index.problem == NO_ANSWER))
    if source.data.unusable == "stop" and len(unusable_rows):
        raise UserError(_describe_problem(index, int(unusable_rows[0]), samples, limits))


def _describe_problem(index: Index, row_index: int, samples: Samples, limits: LengthLimits) -> str:
    """Returns the error message about a row that cannot be trained on.

    Args:
        index: index of the training file.
        row_index: index of a row whose problem is `MALFORMED` or `NO_ANSWER`.
        samples: the training file.
        limits: limits on the length of a row.
    """
    sample_index = int(index.sample[row_index])
    if index.problem[row_index] == MALFORMED:
        # The index does not store messages, so the sample is parsed again for its error.
        try:
            samples.parse(sample_index)
        except UserError as error:
            return str(error)
    clip = index.clips[index.image[row_index]]
    visual = "" if clip is None else f" ({clip.num_tokens:,} of them of its video)"
    remedy = (
        "" if clip is None else "; config.data.num_frames or config.data.fps samples fewer frames"
    )
    return (
        f"{samples.place(sample_index)}: no answer within the first {limits.context} embeddings"
        f"{visual}, which data.context_limit allows{remedy}"
    )


def _find_missing_images(index: Index, samples: Samples, source: Source) -> Bool[np.ndarray, " r"]:
    """Checks that the images and videos of all rows exist inside the image folder.

    Args:
        index: the r rows of the training file.
        samples: the training file, for messages.
        source: the image folder, and whether a missing image is an error.

    Returns:
        [r] True for each row whose image file is missing; False for a row without an image.

    Raises:
        FileNotFoundError: an image is missing, and `source.data.missing` is "stop".
        ImagePathError: a link leads out of the image folder.
    """
    image_states = ImageFolder(source.image_root, source.linked_folders).check(index.names)
    # A row without an image has the image index -1, which selects the appended state.
    row_states = np.append(image_states, PRESENT)[index.image]
    outside_rows = np.flatnonzero(row_states == OUTSIDE)
    missing_rows = np.flatnonzero(row_states == MISSING)
    if len(outside_rows):
        row_index = int(outside_rows[0])
        place, image_name = _locate_image(index, row_index, samples)
        raise ImagePathError(
            f'{place}: "{index.kind(row_index)}": {image_name} is a link that leads out of '
            f"{source.image_root}; if this is intended, add its target folder to "
            "config.data.linked_folders"
        )
    if source.data.missing == "stop" and len(missing_rows):
        row_index = int(missing_rows[0])
        place, image_name = _locate_image(index, row_index, samples)
        num_more = np.count_nonzero(image_states == MISSING) - 1
        kinds = "images or videos" if index.is_video.any() else "images"
        more = f", and {num_more:,} more {kinds} are missing" if num_more else ""
        raise FileNotFoundError(
            f'{place}: "{index.kind(row_index)}": no file, or an empty one, at '
            f"{source.image_root / image_name}{more}; config.data.missing = 'skip' skips such "
            "samples"
        )
    return row_states == MISSING


def _locate_image(index: Index, row_index: int, samples: Samples) -> tuple[str, str]:
    """Returns file and sample of a row as text for messages, and the name of the row's image."""
    return samples.place(int(index.sample[row_index])), index.names[index.image[row_index]]


def _report_skipped_rows(
    index: Index,
    is_missing: Bool[np.ndarray, " r"],
    samples: Samples,
    split_turns: bool,
    limits: LengthLimits,
) -> list[str]:
    """Describes the contents of a training file and its skipped rows.

    Args:
        index: the r rows of the training file.
        is_missing: [r] whether the image file of a row is missing.
        samples: the training file.
        split_turns: whether each question of a conversation is a row.
        limits: limits on the length of a row.

    Returns:
        A line with the numbers of samples and images, and one line per reason for skipping rows.
    """

    def locate(row_index: int) -> str:
        return ", ".join(_locate_image(index, row_index, samples))

    def describe(row_index: int) -> str:
        return _describe_problem(index, row_index, samples, limits)

    no_answer = (index.problem == NO_ANSWER) & ~is_missing
    num_videos = int(index.is_video.sum())
    medium = "image or video" if num_videos else "image"
    # Rows to skip, the reason, and a function that describes the first of these rows.
    reasons: list[tuple[np.ndarray, str, Callable[[int], str] | None]] = [
        (index.problem == TEXT_ONLY, "text only, nothing to prune", None),
        (index.problem == NO_TURNS, "only a first message of the assistant", None),
        (is_missing, f"the {medium} is missing", locate),
        (index.problem == UNREADABLE, "the video cannot be read", locate),
        (index.problem == MALFORMED, "malformed", describe),
        (no_answer, "no answer within the context", describe),
    ]
    num_questions = f", {len(index.sample):,} questions" if split_turns else ""
    num_samples, num_images = len(samples.entries), len(index.names) - num_videos
    videos = f", {num_videos:,} videos" if num_videos else ""
    lines = [
        f"{samples.file}: {num_samples:,} samples{num_questions}, {num_images:,} images{videos}"
    ]
    for is_skipped, reason, describe_row in reasons:
        skipped_rows = np.flatnonzero(is_skipped)
        if len(skipped_rows):
            example = f"; the first: {describe_row(int(skipped_rows[0]))}" if describe_row else ""
            lines.append(f"  {len(skipped_rows):,} skipped: {reason}{example}")
    return lines


def _report_lengths(
    index: Index, usable_rows: Int[np.ndarray, " u"], corpus: Corpus, limits: LengthLimits
) -> list[str]:
    """Describes the number and the lengths of the usable rows.

    Args:
        index: all rows of the training file, with token counts before truncation.
        usable_rows: [u] indices of the usable rows in `index`.
        corpus: the usable rows, with token counts after truncation.
        limits: limits on the length of a row.

    Returns:
        A line with totals, and one line per kind of length with its quantiles.
    """
    lengths = corpus.lengths

    def summarize(name: str, token_counts: np.ndarray, truncation: str = "") -> str:
        median, percentile_95 = np.quantile(token_counts, (0.5, 0.95), method="lower")
        return (
            f"  {name}: median {median:,}, 95 % {percentile_95:,}, "
            f"longest {token_counts.max():,}{truncation}"
        )

    def count_truncated(full_counts: np.ndarray, max_count: int, limit: int) -> str:
        num_truncated = int(np.count_nonzero(full_counts > max_count))
        return f"; {num_truncated:,} truncated to {limit:,}" if num_truncated else ""

    num_supervised_tokens = int(lengths.targets.sum(dtype=np.int64))
    # The image of a row has one id and `image_tokens` embeddings.
    num_visual_tokens, visual = limits.image_tokens, f"{limits.image_tokens:,} of them visual"
    if lengths.visual is not None:
        num_visual_tokens = np.where(lengths.visual, lengths.visual, limits.image_tokens)
        visual = f"up to {num_visual_tokens.max():,} of them visual"
    num_marks = index.marks[usable_rows]
    num_embeddings = lengths.ids + num_visual_tokens - num_marks
    max_ids = limits.context - num_visual_tokens + num_marks
    return [
        f"  {len(usable_rows):,} rows to train on, {num_supervised_tokens:,} supervised tokens",
        summarize(
            f"embeddings, {visual}",
            num_embeddings,
            count_truncated(index.ids[usable_rows] - max_ids, 0, limits.context),
        ),
        summarize("supervised tokens", lengths.targets),
        summarize(
            "the user's words",
            lengths.text,
            count_truncated(index.text[usable_rows], limits.policy_text, limits.policy_text),
        ),
    ]
