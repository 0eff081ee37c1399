"""Builds and caches the index of a training file.

A row is one training example: a question of a conversation with its supervised answer, with or
without the preceding turns. The index holds a few numbers for each row: its sample, its token
counts, and whether it can be trained on.
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
from jaxtyping import Int
from tqdm import tqdm, trange

from stepprune_jax.data.encoding import IGNORE, ConversationEncoder, last_answer
from stepprune_jax.data.image_files import ImagePathError
from stepprune_jax.data.json_files import file_named
from stepprune_jax.data.llava import Conversation, parse_conversation
from stepprune_jax.user_input import UserError, naming

# Part of the cached file's name. It must change with the format or meaning of an index.
_FORMAT_VERSION = 6
# Conversations tokenised in one call: enough for all processor cores, few enough for a smooth bar.
_ROWS_PER_CALL = 256

# Values of `Index.problem`.
USABLE, TEXT_ONLY, MALFORMED, NO_ANSWER, NO_TURNS = range(5)


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

    def place(self, sample: int) -> str:
        """Returns file and number of a sample, for messages."""
        return f"{self.file}: sample {sample}"

    def parse(self, sample: int) -> Conversation:
        """Parses a sample, and checks that the model's template accepts its turns.

        Raises:
            ValueError: the sample is malformed, or the template refuses a turn.
        """
        place = self.place(sample)
        conversation = parse_conversation(self.entries[sample], place)
        with naming(place):
            self.conversation(conversation.turns)
        return conversation

    def turns(self, sample: int, first: int, pair: int) -> tuple[str, ...]:
        """Returns the turns of a row; the arguments are fields of `Index`."""
        return self.parse(sample).turns[2 * first : 2 * pair + 2]


class Index(NamedTuple):
    """The r rows of a training file, built by `scan` and `measure`.

    A pair is a question of a conversation and its answer. Pairs are numbered from 0.

    Attributes:
        names: names of the distinct images, as in the file.
        sample: [r] number of the row's sample in the file.
        first: [r] number of the row's first pair in the sample.
        pair: [r] number of the row's last pair, whose answer is supervised.
        image: [r] index of the row's image in `names`; -1 without an image.
        problem: [r] `USABLE`, or the reason why the row cannot be trained on. `TEXT_ONLY`: no
            image. `MALFORMED`: the sample has a fault. `NO_ANSWER`: the context ends before the
            answer. `NO_TURNS`: the sample has only a message that is dropped.
        ids: [r] number of ids, with one id for the image.
        text: [r] number of ids of the user's text.
        targets: [r] number of supervised tokens within the context.
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


def scan(samples: Samples, split_turns: bool, skip_malformed: bool) -> Index:
    """Checks all samples and lists their rows, without tokenising.

    Args:
        samples: the training file.
        split_turns: True makes each pair a row. False makes the conversation one row, which ends
            with a random pair.
        skip_malformed: whether a malformed sample becomes a `MALFORMED` row instead of an error. An
            image path that leaves its folder is always an error.

    Returns:
        The index, with token counts of 0.

    Raises:
        ValueError: a sample is malformed.
    """
    rows, image_numbers = [], {}
    for sample in trange(
        len(samples.entries), desc="checking samples", unit="sample", disable=None
    ):
        try:
            conversation = samples.parse(sample)
        except UserError as error:
            if isinstance(error, ImagePathError) or not skip_malformed:
                raise
            rows.append((sample, 0, 0, -1, MALFORMED))
            continue
        if conversation.image is None or not conversation.turns:
            problem = NO_TURNS if conversation.image else TEXT_ONLY
            rows.append((sample, 0, 0, -1, problem))
            continue
        image = image_numbers.setdefault(conversation.image, len(image_numbers))
        num_pairs = len(conversation.turns) // 2
        if split_turns:
            rows += [(sample, pair, pair, image, USABLE) for pair in range(num_pairs)]
        else:
            # The seed is the sample's number, so all hosts choose the same pair.
            last_pair = random.Random(sample).randrange(num_pairs)
            rows.append((sample, 0, last_pair, image, USABLE))
    zeros = np.zeros(len(rows), np.int32)
    return Index(tuple(image_numbers), *np.array(rows, np.int32).T, zeros, zeros, zeros)


def measure(
    index: Index, samples: Samples, encoder: ConversationEncoder, context_ids: int
) -> Index:
    """Tokenises every usable row and returns the index with token counts.

    Args:
        index: result of `scan`.
        samples: the training file.
        encoder: the model's encoder of conversations.
        context_ids: number of ids after which a row is truncated. A row without supervised tokens
            before this limit becomes `NO_ANSWER`.
    """
    ids, text, targets = (np.zeros(len(index.sample), np.int32) for _ in range(3))
    rows = np.flatnonzero(index.problem == USABLE)
    with tqdm(total=len(rows), desc="counting tokens", unit="row", disable=None) as bar:
        for start in range(0, len(rows), _ROWS_PER_CALL):
            part = rows[start : start + _ROWS_PER_CALL]
            keys = np.stack([index.sample, index.first, index.pair], axis=1)[part].tolist()
            turns = [samples.turns(*key) for key in keys]
            for row, encoded in zip(part, encoder.encode_all(turns, 1), strict=True):
                ids[row], text[row] = len(encoded.ids), len(encoded.text)
                labels = np.array(last_answer(encoded.labels)[:context_ids])
                targets[row] = np.count_nonzero(labels != IGNORE)
            bar.update(len(part))
    problem = np.where((index.problem == USABLE) & (targets == 0), NO_ANSWER, index.problem)
    return index._replace(problem=problem, ids=ids, text=text, targets=targets)


def index_path(folder: Path, data: str, encoder: ConversationEncoder, *choices: object) -> Path:
    """Returns the path of a cached index. Its name is a hash of everything the index depends on.

    Args:
        folder: folder of cached indices.
        data: identity of the training file.
        encoder: the model's encoder of conversations.
        *choices: JSON values that the index also depends on.
    """
    tokenizer = encoder.tokenizer
    backend = tokenizer.backend_tokenizer.to_str()
    prompt = encoder.conversation([encoder.place_images("Q", 1), "A", "Q", "A"])
    dependencies = [_FORMAT_VERSION, data, backend, tokenizer.bos_token_id, prompt, *choices]
    digest = hashlib.sha256(json.dumps(dependencies).encode()).hexdigest()
    return folder / f"index-{digest[:16]}.npz"


def save_index(index: Index, path: Path) -> None:
    """Writes an index atomically."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(f".{uuid.uuid4().hex}.partial")  # several hosts may write at once
    names = np.frombuffer(json.dumps(index.names).encode(), np.uint8)
    try:
        with file_named(partial), partial.open("wb") as file:
            np.savez(file, **index._asdict() | {"names": names})
        os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)  # on a full disk, an incomplete file remains


def load_index(path: Path) -> Index | None:
    """Reads a cached index.

    Returns:
        The index, or None if the file is missing or damaged and the index must be rebuilt.
    """
    try:
        with path.open("rb") as file, np.load(file, allow_pickle=False) as archive:
            arrays = {name: archive[name] for name in Index._fields}
        names = tuple(json.loads(arrays.pop("names").tobytes()))
    except Exception:  # a damaged file may raise any kind
        return None
    are_integers = all(array.dtype.kind in "iu" for array in arrays.values())
    return Index(names=names, **arrays) if are_integers else None
