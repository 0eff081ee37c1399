"""Builds and caches the index of a training file.

A sample is one entry of the file: a conversation, usually about an image. A row is one training
example: a question of a sample with its supervised answer, with or without the preceding turns. The
index holds a few numbers for each row: its sample, its token counts, and whether it can be trained
on.
"""

import hashlib
import json
import os
import random
import uuid
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Float, Int
from tqdm import tqdm, trange

from stepprune_jax.data.encoding import IGNORE, ConversationEncoder, last_answer
from stepprune_jax.data.image_files import ImagePathError
from stepprune_jax.data.json_files import file_named
from stepprune_jax.data.llava import Conversation, parse_conversation
from stepprune_jax.data.prompts import IMAGE_TOKEN
from stepprune_jax.data.videos import ClipShape
from stepprune_jax.user_input import UserError, naming

# Part of the cached file's name. It must change with the format or meaning of an index.
_FORMAT_VERSION = 7
# Conversations tokenized in one call: enough for all processor cores, few enough for a smooth bar.
_ROWS_PER_CALL = 256

# Values of `Index.problem`.
USABLE, TEXT_ONLY, MALFORMED, NO_ANSWER, NO_TURNS, UNREADABLE = range(6)


class Samples(NamedTuple):
    """The samples of a training file.

    Attributes:
        file: the training file.
        entries: values of the file's JSON list, not yet checked.
        conversation: turns -> the prompt in the model's template; raises for turns that the
            template refuses.
    """

    file: Path
    entries: Sequence[Any]
    conversation: Callable[[Sequence[str | None]], str]

    def place(self, sample_index: int) -> str:
        """Returns the file and the index of a sample as text, for messages."""
        return f"{self.file}: sample {sample_index}"

    def parse(self, sample_index: int) -> Conversation:
        """Parses a sample, and checks that the model's template accepts its turns.

        Raises:
            ValueError: the sample is malformed, or the template refuses a turn.
        """
        place = self.place(sample_index)
        conversation = parse_conversation(self.entries[sample_index], place)
        with naming(place):
            self.conversation(conversation.turns)  # called only to raise its errors here
        return conversation

    def turns(self, sample_index: int, first_pair: int, last_pair: int) -> tuple[str, ...]:
        """Returns the turns of a sample from one pair of question and answer to another.

        Args:
            sample_index: index of the sample.
            first_pair: index of the first pair.
            last_pair: index of the last pair, which is included.
        """
        return self.parse(sample_index).turns[2 * first_pair : 2 * last_pair + 2]


class Index(NamedTuple):
    """The r rows of a training file, built by `scan` and `measure`.

    A pair is a question of a conversation and its answer.

    Attributes:
        names: names of the i distinct images and videos, as in the file.
        sample: [r] index of the row's sample in the file.
        first: [r] index of the row's first pair in the sample.
        pair: [r] index of the row's last pair in the sample. Its answer is supervised.
        image: [r] index of the row's image or video in `names`; -1 without one.
        problem: [r] `USABLE`, or the reason why the row cannot be trained on. `TEXT_ONLY`: no image
            and no video. `MALFORMED`: the sample has a fault. `NO_ANSWER`: the context ends before
            the answer. `NO_TURNS`: the sample has only a message that is dropped. `UNREADABLE`: the
            video cannot be read.
        ids: [r] number of token ids. An image has one id. A video has one, or one for each temporal
            patch.
        text: [r] number of token ids of the user's text, which the policy reads.
        targets: [r] number of supervised tokens within the context.
        marks: [r] number of ids of the row's image or video.
        is_video: [i] 1 for a video, 0 for an image.
        patches: [i] number of temporal patches of each video; 0 for an image, and for a video that
            is missing or unreadable.
        grid: [i, 2] rows and columns of the visual tokens of a temporal patch; 0 for an image.
        stamp: [i] size and time of each video file, from `file_stamp`; 0 for an image.
        times: [p] times of the temporal patches of all videos in seconds, one video after another.
    """

    names: tuple[str, ...]
    sample: Int[np.ndarray, " r"]
    first: Int[np.ndarray, " r"]
    pair: Int[np.ndarray, " r"]
    image: Int[np.ndarray, " r"]
    problem: Int[np.ndarray, " r"]
    ids: Int[np.ndarray, " r"]
    text: Int[np.ndarray, " r"]
    targets: Int[np.ndarray, " r"]
    marks: Int[np.ndarray, " r"]
    is_video: Int[np.ndarray, " i"]
    patches: Int[np.ndarray, " i"]
    grid: Int[np.ndarray, "i 2"]
    stamp: Int[np.ndarray, " i"]
    times: Float[np.ndarray, " p"]

    @property
    def clips(self) -> list[ClipShape | None]:
        """For each of `names`, the shape of the video; None for an image or an unreadable video."""
        stops = np.cumsum(self.patches)
        return [
            ClipShape(tuple(self.times[stop - count : stop].tolist()), tuple(grid))
            if count
            else None
            for stop, count, grid in zip(
                stops.tolist(), self.patches.tolist(), self.grid.tolist(), strict=True
            )
        ]

    def kind(self, row_index: int) -> str:
        """Returns "video" or "image", the name of the field that names the row's file."""
        return "video" if self.is_video[self.image[row_index]] else "image"


def scan(samples: Samples, split_turns: bool, skip_malformed: bool) -> Index:
    """Checks all samples and lists their rows, without tokenizing.

    Args:
        samples: the training file.
        split_turns: True makes each pair a row, without the pairs before it. False makes the
            conversation one row, which ends with a random pair.
        skip_malformed: whether a malformed sample becomes a `MALFORMED` row instead of an error. An
            image path that leaves its folder is always an error.

    Returns:
        The index, with token counts of 0.

    Raises:
        ValueError: a sample is malformed.
    """
    rows: list[tuple[int, int, int, int, int]] = []  # the fields from `sample` to `problem`
    image_indices: dict[tuple[str, bool], int] = {}  # by name, and whether it is a video
    sample_indices = trange(
        len(samples.entries), desc="checking samples", unit="sample", disable=None
    )
    for sample_index in sample_indices:
        try:
            conversation = samples.parse(sample_index)
        except UserError as error:
            if isinstance(error, ImagePathError) or not skip_malformed:
                raise
            rows.append((sample_index, 0, 0, -1, MALFORMED))
            continue
        name = conversation.image or conversation.video
        if name is None or not conversation.turns:
            rows.append((sample_index, 0, 0, -1, NO_TURNS if name else TEXT_ONLY))
            continue
        key = name, conversation.video is not None
        image_index = image_indices.setdefault(key, len(image_indices))
        num_pairs = len(conversation.turns) // 2
        if split_turns:
            rows += [(sample_index, pair, pair, image_index, USABLE) for pair in range(num_pairs)]
        else:
            # The seed is the sample's index, so all hosts choose the same pair.
            last_pair = random.Random(sample_index).randrange(num_pairs)
            rows.append((sample_index, 0, last_pair, image_index, USABLE))
    token_counts = np.zeros((4, len(rows)), np.int32)
    num_images = len(image_indices)
    return Index(
        tuple(name for name, _ in image_indices),
        *np.array(rows, np.int32).T,
        *token_counts,
        is_video=np.array([is_video for _, is_video in image_indices], np.int32),
        patches=np.zeros(num_images, np.int32),
        grid=np.zeros((num_images, 2), np.int32),
        stamp=np.zeros(num_images, np.int64),
        times=np.zeros(0),
    )


def measure(
    index: Index,
    samples: Samples,
    encoder: ConversationEncoder,
    max_ids: Callable[[int, ClipShape | None], int],
) -> Index:
    """Tokenises every usable row, and returns the index with token counts.

    Args:
        index: result of `scan`, with the shapes of videos.
        samples: the training file.
        encoder: the model's encoder of conversations.
        max_ids: (number of ids of the image or video, shape of the video or None) -> number of ids
            after which a row is truncated. A row without supervised tokens before this limit
            becomes `NO_ANSWER`.
    """
    num_rows, clips = len(index.sample), index.clips
    num_ids, num_text_ids, num_targets, num_marks = np.zeros((4, num_rows), np.int32)
    usable_rows = np.flatnonzero(index.problem == USABLE)
    with tqdm(total=len(usable_rows), desc="counting tokens", unit="row", disable=None) as bar:
        for start in range(0, len(usable_rows), _ROWS_PER_CALL):
            rows = usable_rows[start : start + _ROWS_PER_CALL]
            spans = zip(
                index.sample[rows].tolist(),
                index.first[rows].tolist(),
                index.pair[rows].tolist(),
                strict=True,
            )
            conversations = [samples.turns(*span) for span in spans]
            row_clips = [clips[image] for image in index.image[rows].tolist()]
            all_encoded = encoder.encode_all(conversations, 1, row_clips)
            for row, encoded, clip in zip(rows, all_encoded, row_clips, strict=True):
                num_marks[row] = encoded.ids.count(IMAGE_TOKEN)
                context_ids = max_ids(int(num_marks[row]), clip)
                labels = np.array(last_answer(encoded.labels)[:context_ids])
                num_ids[row], num_text_ids[row] = len(encoded.ids), len(encoded.text)
                num_targets[row] = np.count_nonzero(labels != IGNORE)
            bar.update(len(rows))
    has_no_answer = (index.problem == USABLE) & (num_targets == 0)
    problem = np.where(has_no_answer, NO_ANSWER, index.problem)
    return index._replace(
        problem=problem, ids=num_ids, text=num_text_ids, targets=num_targets, marks=num_marks
    )


def index_path(folder: Path, data: str, encoder: ConversationEncoder, *choices: object) -> Path:
    """Returns the path of a cached index. The file name is a hash of all inputs of the index.

    Args:
        folder: folder that caches indices.
        data: hash of the training file's contents.
        encoder: the model's encoder of conversations.
        *choices: further inputs of the index, such as settings, as JSON values.
    """
    tokenizer = encoder.tokenizer
    tokenizer_json = tokenizer.backend_tokenizer.to_str()
    # The template is a function, which cannot be hashed. The prompt that it writes for a made-up
    # conversation is hashed instead.
    prompt = encoder.conversation([encoder.place_images("Q", 1), "A", "Q", "A"])
    dependencies = [_FORMAT_VERSION, data, tokenizer_json, tokenizer.bos_token_id, prompt, *choices]
    digest = hashlib.sha256(json.dumps(dependencies).encode()).hexdigest()
    return folder / f"index-{digest[:16]}.npz"


def save_index(index: Index, path: Path) -> None:
    """Writes an index atomically."""
    path.parent.mkdir(parents=True, exist_ok=True)
    # Several hosts may write the index at once, so their temporary files have different names.
    temporary_path = path.with_suffix(f".{uuid.uuid4().hex}.partial")
    # The archive must not contain pickled text, so the names are stored as the bytes of JSON.
    name_bytes = np.frombuffer(json.dumps(index.names).encode(), np.uint8)
    try:
        with file_named(temporary_path), temporary_path.open("wb") as file:
            arrays: dict[str, Any] = index._asdict() | {"names": name_bytes}
            np.savez(file, **arrays)
        os.replace(temporary_path, path)
    finally:
        temporary_path.unlink(missing_ok=True)  # on a full disk, an incomplete file remains


def load_index(path: Path) -> Index | None:
    """Reads a cached index.

    Returns:
        The index, or None if the file is missing or damaged and the index must be rebuilt.
    """
    try:
        with path.open("rb") as file, np.load(file, allow_pickle=False) as archive:
            arrays = {name: archive[name] for name in Index._fields}
        names = tuple(json.loads(arrays.pop("names").tobytes()))
    except Exception:  # a damaged file may raise any type of error
        return None
    are_numbers = all(array.dtype.kind in "iuf" for array in arrays.values())
    return Index(names=names, **arrays) if are_numbers else None
