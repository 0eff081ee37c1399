"""The index of a training file, built in one pass and cached in a folder.

An index holds a few numbers for each row: its sample, its token counts, and whether it can be
trained on. A row ends with the answer that is learned: it is a question of a conversation
with its answer, alone or after the preceding turns.
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

# Version of the index format; a change invalidates older files.
_FORM = 6
# Conversations tokenised in one call.
_PART = 256

USABLE, TEXT_ONLY, MALFORMED, NO_ANSWER, NOTHING_SAID = range(5)


class Samples(NamedTuple):
    """A training file as it was read, its entries, and the model's template of their turns."""

    file: Path
    entries: Sequence[Any]
    conversation: Callable[[Sequence[str | None]], str]

    def where(self, sample: int) -> str:
        """Returns file and number of a sample, for messages."""
        return f"{self.file}: sample {sample}"

    def parse(self, sample: int) -> Conversation:
        """Parses and checks a sample, of whose text the template may refuse some."""
        where = self.where(sample)
        parsed = parse_conversation(self.entries[sample], where)
        with naming(where):
            self.conversation(parsed.turns)
        return parsed

    def turns(self, sample: int, first: int, pair: int) -> tuple[str, ...]:
        """Returns the turns of a row."""
        return self.parse(sample).turns[2 * first : 2 * pair + 2]


class Index(NamedTuple):
    """The r rows of a training file.

    Attributes:
        names: names of the distinct images, as in the file.
        sample: number of the sample of each row.
        first: number of the first question of the sample that belongs to the row.
        pair: number of the question whose answer is learned, the last of the row.
        image: number of the row's image among `names`; -1 if there is none.
        problem: `USABLE`, or why the row cannot be trained on: `TEXT_ONLY`, `MALFORMED`,
            `NO_ANSWER` within the context, or `NOTHING_SAID` but a message that is dropped.
        ids: number of ids of the row, counting its image as one.
        text: number of ids of the user's words.
        targets: number of supervised tokens within the context.
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
    """Checks all samples and records their rows; nothing is tokenised."""
    rows, names = [], {}
    for number in trange(
        len(samples.entries), desc="checking samples", unit="sample", disable=None
    ):
        try:
            record = samples.parse(number)
        except UserError as error:
            if isinstance(error, ImagePathError) or not skip_malformed:
                raise
            rows.append((number, 0, 0, -1, MALFORMED))
            continue
        if record.image is None or not record.turns:
            why = NOTHING_SAID if record.image else TEXT_ONLY
            rows.append((number, 0, 0, -1, why))
            continue
        image = names.setdefault(record.image, len(names))
        questions = len(record.turns) // 2
        if split_turns:
            rows += [(number, pair, pair, image, USABLE) for pair in range(questions)]
        else:
            last = random.Random(number).randrange(questions)
            rows.append((number, 0, last, image, USABLE))
    sample, first, pair, image, problem = np.array(rows, np.int32).T
    zero = np.zeros(len(rows), np.int32)
    return Index(tuple(names), sample, first, pair, image, problem, zero, zero, zero)


def measure(
    index: Index, samples: Samples, encoder: ConversationEncoder, context_ids: int
) -> Index:
    """Tokenises every row once and records the counts."""
    ids, text, targets = (np.zeros(len(index.sample), np.int32) for _ in range(3))
    rows = np.flatnonzero(index.problem == USABLE)
    with tqdm(total=len(rows), desc="counting tokens", unit="row", disable=None) as bar:
        for begin in range(0, len(rows), _PART):
            part = rows[begin : begin + _PART]
            places = np.stack([index.sample, index.first, index.pair], axis=1)[part].tolist()
            turns = [samples.turns(*place) for place in places]
            for row, encoded in zip(part, encoder.encode_all(turns, 1), strict=True):
                ids[row], text[row] = len(encoded.ids), len(encoded.text)
                labels = np.array(last_answer(encoded.labels)[:context_ids])
                targets[row] = np.count_nonzero(labels != IGNORE)
            bar.update(len(part))
    problem = np.where((index.problem == USABLE) & (targets == 0), NO_ANSWER, index.problem)
    return index._replace(problem=problem, ids=ids, text=text, targets=targets)


def index_path(folder: Path, data: str, encoder: ConversationEncoder, *choices: object) -> Path:
    """Returns the path of a file's index, whose name is a hash of contents and choices."""
    tokenizer = encoder.tokenizer
    backend = tokenizer.backend_tokenizer.to_str()
    prompt = encoder.conversation([encoder.place_images("Q", 1), "A", "Q", "A"])
    determined_by = [_FORM, data, backend, tokenizer.bos_token_id, prompt, *choices]
    digest = hashlib.sha256(json.dumps(determined_by).encode()).hexdigest()
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
        partial.unlink(missing_ok=True)  # half of it, on a full disk


def load_index(path: Path) -> Index | None:
    """Reads an index; None if it is absent or damaged, and has to be rebuilt."""
    try:
        with path.open("rb") as file, np.load(file, allow_pickle=False) as found:
            arrays = {name: found[name] for name in Index._fields}
        names = tuple(json.loads(arrays.pop("names").tobytes()))
    except Exception:  # a damaged file may raise any kind
        return None
    known = all(array.dtype.kind in "iu" for array in arrays.values())
    return Index(names=names, **arrays) if known else None
