"""Gives access to the rows of a training file, and tokenizes each row on demand.

A row is one training example: the turns of a conversation up to a question, and the answer to this
question, whose tokens are supervised.
"""

import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
from jaxtyping import Int

from stepprune_jax.data.encoding import (
    IGNORE,
    ConversationEncoder,
    EncodedConversation,
    last_answer,
)
from stepprune_jax.data.index import Index, Samples
from stepprune_jax.data.llava import Question
from stepprune_jax.data.prompts import IMAGE_TOKEN
from stepprune_jax.data.source import VideoSampling
from stepprune_jax.data.videos import ClipShape, Video


class LengthLimits(NamedTuple):
    """Limits on the length of a row. Longer rows are truncated at the end.

    Attributes:
        image_tokens: number of visual tokens of the largest image. The tokens of a video are
            counted for each video.
        context: maximum number of embeddings of a conversation, with one for each text token and
            for each visual token.
        policy_text: maximum number of tokens of the user's text that the policy reads.
    """

    image_tokens: int
    context: int
    policy_text: int

    @property
    def ids(self) -> int:
        """Maximum number of ids of a conversation. The image has one id, `IMAGE_TOKEN`."""
        return self.max_ids(1, None)

    def max_ids(self, num_marks: int, clip: ClipShape | None) -> int:
        """Returns the maximum number of ids of a conversation.

        Args:
            num_marks: number of ids of its image or video.
            clip: shape of its video; None for an image.
        """
        num_visual_tokens = self.image_tokens if clip is None else clip.num_tokens
        return max(0, self.context - num_visual_tokens + num_marks)


class TrainingRow(NamedTuple):
    """Token ids of one training example, without its image. Batches are built from these.

    Attributes:
        ids: [l] ids of the prompt and its answer, with `IMAGE_TOKEN` at the image, at the video, or
            at each temporal patch of the video.
        text: [t] ids of the user's text, which the policy reads.
        place: [k] index into `ids` of the token before each supervised token. The model predicts
            the supervised token there.
        target: [k] ids of the supervised tokens.
    """

    ids: Int[np.ndarray, " l"]
    text: Int[np.ndarray, " t"]
    place: Int[np.ndarray, " k"]
    target: Int[np.ndarray, " k"]


def make_row(
    encoded: EncodedConversation, limits: LengthLimits, clip: ClipShape | None = None
) -> TrainingRow:
    """Builds a training row whose supervised tokens are the last answer of a conversation.

    Args:
        encoded: ids and labels of a conversation with one image or video.
        limits: maximum lengths. Longer conversations and user's texts are truncated.
        clip: shape of the video; None for an image.

    Returns:
        The row.
    """
    max_ids = limits.max_ids(encoded.ids.count(IMAGE_TOKEN), clip)
    ids = np.array(encoded.ids[:max_ids], np.int32)
    labels = np.array(last_answer(encoded.labels)[:max_ids], np.int32)
    # The first id has no token before it that could predict it, so it is never supervised.
    previous_index = np.flatnonzero(labels[1:] != IGNORE).astype(np.int32)
    text = np.array(encoded.text[: limits.policy_text], np.int32)
    return TrainingRow(ids, text, previous_index, labels[previous_index + 1])


class Lengths(NamedTuple):
    """Token counts of the u usable rows after truncation.

    Attributes:
        ids: [u] number of ids, including the ids of the image or video.
        text: [u] number of ids of the user's text.
        targets: [u] number of supervised tokens.
        patches: [u] number of temporal patches of the video, 0 for an image; None if no row has a
            video.
        visual: [u] number of visual tokens of the video, 0 for an image; None if no row has a
            video.
    """

    ids: Int[np.ndarray, " u"]
    text: Int[np.ndarray, " u"]
    targets: Int[np.ndarray, " u"]
    patches: Int[np.ndarray, " u"] | None = None
    visual: Int[np.ndarray, " u"] | None = None


class Corpus:
    """The u usable rows of a training file, indexed from 0 to u - 1. Threads may share a corpus.

    Attributes:
        lengths: token counts of the rows.
        identity: hash that changes if other rows of the training file become usable.
    """

    def __init__(
        self,
        index: Index,
        usable_rows: Int[np.ndarray, " u"],
        *,
        samples: Samples,
        root: Path,
        encoder: ConversationEncoder,
        limits: LengthLimits,
        sampling: VideoSampling = VideoSampling(),  # noqa: B008
    ):
        """Builds a corpus from an index.

        Args:
            index: index of the training file, with token counts.
            usable_rows: [u] indices of the usable rows in `index`.
            samples: the training file.
            root: folder that the names of images and videos are relative to.
            encoder: the model's encoder of conversations.
            limits: limits on the length of a row.
            sampling: sampling of the frames of videos.
        """
        self._samples, self._image_names, self._root = samples, index.names, root
        self._clips, self._sampling = index.clips, sampling
        self._sample_index = index.sample[usable_rows]
        self._first_pair, self._last_pair = index.first[usable_rows], index.pair[usable_rows]
        self._image_index = index.image[usable_rows]
        self._encoder, self._limits = encoder, limits
        tokens_per_image = index.patches * index.grid.prod(1)
        num_clip_tokens = tokens_per_image[self._image_index]
        num_visual_tokens = np.where(num_clip_tokens, num_clip_tokens, limits.image_tokens)
        max_ids = limits.context - num_visual_tokens + index.marks[usable_rows]
        has_videos = bool(num_clip_tokens.any())
        self.lengths = Lengths(
            np.minimum(index.ids[usable_rows], max_ids),
            np.minimum(index.text[usable_rows], limits.policy_text),
            index.targets[usable_rows],
            index.patches[self._image_index] if has_videos else None,
            num_clip_tokens if has_videos else None,
        )
        self.identity = hashlib.sha256(usable_rows.astype(np.int64).tobytes()).hexdigest()

    def __len__(self) -> int:
        return len(self._sample_index)

    def rows(self, row_indices: Sequence[int]) -> list[TrainingRow]:
        """Tokenises some rows of the corpus, in the order of `row_indices`."""
        conversations = [
            self._samples.turns(
                int(self._sample_index[row]), int(self._first_pair[row]), int(self._last_pair[row])
            )
            for row in row_indices
        ]
        clips = [self._clips[self._image_index[row]] for row in row_indices]
        encoded = self._encoder.encode_all(conversations, 1, clips)
        return [
            make_row(conversation, self._limits, clip)
            for conversation, clip in zip(encoded, clips, strict=True)
        ]

    @property
    def file(self) -> Path:
        """The training file."""
        return self._samples.file

    def image(self, row_index: int) -> Path:
        """Returns the path of a row's image or video."""
        return self._root / self._image_names[self._image_index[row_index]]

    def video(self, row_index: int) -> Video | None:
        """Returns a row's video, with the sampling of its frames; None for an image."""
        if self._clips[self._image_index[row_index]] is None:
            return None
        return Video(self.image(row_index), *self._sampling)

    def question(self, row_index: int) -> Question:
        """Returns the last question of a row, without the turns before it.

        The id of the question is "SAMPLE/QUESTION": the index of the sample in the training file,
        and the index of the question in the sample.
        """
        sample_index, pair = int(self._sample_index[row_index]), int(self._last_pair[row_index])
        text = self._samples.turns(sample_index, pair, pair)[0]
        path, video = self.image(row_index), self.video(row_index)
        return Question(f"{sample_index}/{pair}", path, text, "", video)

    def describe(self, row_index: int) -> dict[str, object]:
        """Describes a row for a report on bad training steps.

        Returns:
            "sample": index of the row's sample in the training file. "id": the field "id" of the
            sample. "question": index of the row's question among the questions of the sample.
            "image" or "video": name of the image or video.
        """
        sample_index, image_index = int(self._sample_index[row_index]), self._image_index[row_index]
        kind = "image" if self._clips[image_index] is None else "video"
        return {
            "sample": sample_index,
            "id": self._samples.entries[sample_index].get("id"),
            "question": int(self._last_pair[row_index]),
            kind: self._image_names[image_index],
        }

    def where(self, row_index: int) -> str:
        """Returns the file and the sample of a row as text, for messages."""
        return self._samples.place(int(self._sample_index[row_index]))
