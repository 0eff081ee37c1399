"""Trains a small Qwen3-VL on the world: `python -m experiments.moving_shapes.pretrain`.

First the tower learns to name shape, color and direction at each visual token, by the embeddings of
these words. Then the language model learns to answer from the features of the frozen tower. Most
updates show only some of the visual tokens, as a pruned prompt does. The result, `DIR/model`, is a
folder in the Hugging Face layout. The same command resumes an interrupted run.
"""

import contextlib
import json
import os
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array, Bool, Float, Int, Int8, PyTree, UInt8
from tqdm import tqdm

from experiments.moving_shapes.draw import NUM_PATCHES, NUM_TOKENS, TokenLabels, random_clip
from experiments.moving_shapes.model import (
    PromptLayout,
    cut_patches,
    encode_query,
    image_settings,
    make_backbone,
    make_layout,
    make_tokenizer,
    normalize,
)
from experiments.moving_shapes.scene import (
    COLORS,
    DIRECTIONS,
    FAMILIES,
    GRID,
    KINDS,
    NUM_FRAMES,
    SIDE,
    SPLITS,
    list_queries,
)
from experiments.pretrain.update import (
    Recipe,
    State,
    apply_gradients,
    average_gradients,
    init_state,
)
from stepprune_jax.checkpoints.load import VLM
from stepprune_jax.checkpoints.save import save_vlm
from stepprune_jax.cli.command_line import Parser, exit_with, signal_status
from stepprune_jax.data.prompts import pad_batch
from stepprune_jax.models import decoder
from stepprune_jax.models.attention import Tap
from stepprune_jax.models.decoder import OutputSpec
from stepprune_jax.models.qwen2_5_vl.images import Patches
from stepprune_jax.models.qwen3_vl import Qwen3_VL, tower
from stepprune_jax.models.sequence import Rows
from stepprune_jax.models.stack import Params, unstack
from stepprune_jax.workdir.checkpoints import Checkpoints, Interrupt

_NAME = "experiments.moving_shapes.pretrain"
_SEED = 1000  # no other split of the world has this seed
_MAX_SHAPES = 5
# Words of the classes of `TokenLabels`, from class 1; a plural has the embedding of its singular.
_WORDS = {"kind": KINDS, "color": tuple(COLORS), "direction": tuple(DIRECTIONS)}
_TOWER = ("vision", "merger")
_EMBEDDING_STD = 0.5
_SEEN_PATCHES = 4  # temporal patches of a clip that an update of the tower sees
# Visual tokens that an update of the language model shows, with the fractions of updates; None
# shows all tokens.
_SHOWN = ((None, 0.25), (48, 0.45), (12, 0.3))
_VALIDATION = 128  # clips that are left out of training


class Stage(NamedTuple):
    """Settings of a stage.

    Attributes:
        steps: number of updates.
        batch_size: clips of an update.
        lr: peak learning rate of AdamW.
        muon_lr: peak learning rate of Muon, for matrices.
    """

    steps: int
    batch_size: int
    lr: float
    muon_lr: float


class Exchanges(NamedTuple):
    """All questions about each clip, in one row; see `experiments.pretrain.packing.Packed`.

    Attributes:
        ids: [i, l] ids after the clip; 0 for padding.
        segment: [i, l] number of the question, from 1; -1 for padding.
        offset: [i, l] position within the question, from 0.
        target: [i, a] slot in `ids` of the predecessor of each answer token.
        label: [i, a] tokens of the answers; -1 for padding.
        question: [i, a] number of the question of each label, from 0.
        evidence: [i, q, 10] True = shape that a question depends on; the first 5 numbers are shapes
            in any color, the last 5 are shapes before their color changes.
        family: [i, q] number in `FAMILIES`; -1 for padding.
    """

    ids: Int[np.ndarray | Array, "i l"]
    segment: Int[np.ndarray | Array, "i l"]
    offset: Int[np.ndarray | Array, "i l"]
    target: Int[np.ndarray | Array, "i a"]
    label: Int[np.ndarray | Array, "i a"]
    question: Int[np.ndarray | Array, "i a"]
    evidence: Bool[np.ndarray | Array, "i q e"]
    family: Int[np.ndarray | Array, "i q"]


class Clips(NamedTuple):
    """Clips with labels of their visual tokens.

    Attributes:
        frames: [i, frames, side, side, 3] frames, in a memory-mapped file.
        labels: [i, 5, n] fields of `TokenLabels`.
    """

    frames: UInt8[np.ndarray, "i frames side side 3"]
    labels: Int8[np.ndarray, "i 5 n"]


def draw_clips(folder: Path, count: int) -> Clips:
    """Draws the clips of pretraining, or continues after the last one in the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    shapes = {"frames": (count, NUM_FRAMES, SIDE, SIDE, 3), "labels": (count, 5, NUM_TOKENS)}
    dtypes, progress = {"frames": np.uint8, "labels": np.int8}, folder / "num_drawn.json"
    if not progress.is_file():
        for name, shape in shapes.items():
            np.lib.format.open_memmap(folder / f"{name}.npy", "w+", dtypes[name], shape)
        progress.write_text("0")
    frames, labels = (np.lib.format.open_memmap(folder / f"{name}.npy", "r+") for name in shapes)
    num_drawn = json.loads(progress.read_text())
    for number in tqdm(range(num_drawn, count), "drawing", count, initial=num_drawn, mininterval=9):
        _, frames[number], clip_labels = random_clip(_clip_rng(number))
        labels[number] = clip_labels
        if (number + 1) % 256 == 0 or number + 1 == count:
            frames.flush()
            labels.flush()
            progress.write_text(str(number + 1))
    return Clips(frames, labels)


def _clip_rng(number: int) -> np.random.Generator:
    return np.random.default_rng([_SEED, SPLITS["pretrain"], number])


# The tower.


def tower_loss(
    trained: Params, backbone: Qwen3_VL, piece: tuple[Array, Array]
) -> tuple[Float[Array, ""], dict[str, Array]]:
    """Returns the cross-entropy of the words of each visual token, and accuracies at shapes.

    Args:
        trained: tower, merger and "words", the embeddings of the classes of each kind of word.
        backbone: the model.
        piece: bytes [p, m, v] of temporal patches, and their labels [p, 3, GRID * GRID].
    """
    values, labels = piece
    tokens = encode_patches(trained, backbone, values)
    total, scalars = jnp.zeros(()), {}
    for number, (name, words) in enumerate(sorted(trained["words"].items())):
        label = labels[:, number].astype(jnp.int32)
        logits = tokens @ words.T
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, label)
        is_shape = label > 0
        # Most tokens are background.
        weights = jnp.where(is_shape, 1.0, 0.3)
        total += jnp.sum(losses * weights) / jnp.sum(weights)
        correct = jnp.argmax(logits, -1) == label
        scalars[name] = jnp.sum(correct & is_shape) / jnp.maximum(jnp.sum(is_shape), 1)
    return total, scalars


def encode_patches(params: Params, backbone: Qwen3_VL, values: Array) -> Float[Array, "p n e"]:
    """Runs the tower on temporal patches."""
    grid = jnp.full((len(values), 2), GRID, jnp.int32)
    patches = Patches(normalize(backbone, values), grid)
    # The blocks are unrolled, which makes the gradient faster on a CPU.
    return tower.encode(unstack(params), backbone.config.vision, patches)[0]


def _tower_update(state: State, values: Array, labels: Array, recipe: Recipe):
    def loss(trained, _, piece, __):
        return tower_loss(trained, recipe.backbone, piece)

    grads, scalars = average_gradients(
        loss, state.trained, (), (values, labels), jax.random.key(0), recipe.micro_batch, 1
    )
    return apply_gradients(recipe, state, grads), scalars


# The language model.


def _sample_tokens(key: Array, labels: TokenLabels, num_shown: int) -> Int[Array, "i k"]:
    """Samples visual tokens, in raster order; tokens of shapes are preferred to background."""
    score_key, sharpness_key, taste_key = jax.random.split(key, 3)
    shape = labels.shape.astype(jnp.int32)
    taste = 2.0 * jax.random.normal(taste_key, (len(shape), _MAX_SHAPES + 1))
    score = jnp.take_along_axis(taste, shape, axis=1) + jnp.where(shape >= 0, 4.0, 0.0)
    # In a third of the clips the sample is uniform.
    sharpness = jnp.maximum(0, jax.random.uniform(sharpness_key, (len(shape), 1), minval=-0.5))
    score = 2 * sharpness * score + jax.random.gumbel(score_key, score.shape)
    return jnp.sort(jax.lax.top_k(score, num_shown)[1], axis=1)


def _memory_labels(labels: TokenLabels) -> dict[str, Int[Array, "i k"]]:
    """Returns labels of what the shown tokens up to each one say; -1 for background.

    A hidden state that carries them answers questions about the order of events. They are: the
    number of shapes of the token's kind so far, whether no other shape was before, and the first
    color of the token's shape.
    """
    shape = labels.shape.astype(jnp.int32)
    is_shape = shape >= 0
    of_shape = jax.nn.one_hot(shape, _MAX_SHAPES)
    is_known_shape = jnp.cumsum(of_shape, axis=1) > 0
    kind_of_shape = jnp.max(of_shape * labels.kind[..., None], axis=1)
    same_kind = kind_of_shape[:, None] == labels.kind[..., None]
    count = jnp.sum(is_known_shape & same_kind, axis=2)
    index = jnp.where(is_shape, jnp.arange(shape.shape[1]), shape.shape[1])
    first_shape = jnp.take_along_axis(
        shape, jnp.minimum(index.min(1), shape.shape[1] - 1)[:, None], 1
    )
    first_index = jnp.argmax(of_shape > 0, axis=1)
    first_color = jnp.take_along_axis(labels.color.astype(jnp.int32), first_index, axis=1)
    color = jnp.take_along_axis(first_color, jnp.maximum(shape, 0), axis=1)
    values = {"count": count, "is_first": shape == first_shape, "first_color": color}
    return {
        name: jnp.where(is_shape, value, -1).astype(jnp.int32) for name, value in values.items()
    }


_MEMORY_CLASSES = {"count": 4, "is_first": 2, "first_color": len(COLORS) + 1}


def language_loss(
    trained: Params,
    backbone: Qwen3_VL,
    layout: PromptLayout,
    piece: tuple[Array, Array, Exchanges],
    key: Array,
    num_shown: int | None,
) -> tuple[Float[Array, ""], dict[str, Array]]:
    """Returns the cross-entropy of the answers that the shown tokens hold, plus memory losses.

    Args:
        trained: the language model, and "heads" for the labels of `_memory_labels`.
        backbone: the model.
        layout: the common beginning of the prompts.
        piece: features [i, n, e] of the tower, token labels [i, 5, n], and the questions.
        key: random key of the shown tokens.
        num_shown: number of visual tokens to show; None shows all.
    """
    features, raw_labels, exchanges = piece
    labels = TokenLabels(*(raw_labels[:, number] for number in range(5)))
    language, text = trained["language"], backbone.config.text
    clips, n, _ = features.shape
    index = jnp.broadcast_to(jnp.arange(n), (clips, n))
    if num_shown is not None:
        index = _sample_tokens(key, labels, num_shown)
        labels = TokenLabels(*(jnp.take_along_axis(label, index, axis=1) for label in labels))
    visual_slots = jnp.asarray(layout.visual_slots)[index]
    text_slots = jnp.broadcast_to(layout.text_slots, (clips, len(layout.text_slots)))
    slots = jnp.sort(jnp.concatenate([text_slots, visual_slots], axis=1), axis=1)
    prefix = decoder.embed(language, jnp.broadcast_to(layout.ids, (clips, len(layout.ids))))
    prefix = prefix.at[:, layout.visual_slots].set(features.astype(prefix.dtype))
    prefix = jnp.take_along_axis(prefix, slots[..., None], axis=1)
    prefix_position = jnp.asarray(layout.positions)[:, slots].swapaxes(0, 1)
    question_position = layout.next_position + exchanges.offset
    question_position = jnp.repeat(question_position[:, None], 3, axis=1)
    segment = jnp.concatenate([jnp.zeros_like(slots), exchanges.segment], axis=1)
    rows = Rows(
        jnp.concatenate([prefix, decoder.embed(language, exchanges.ids)], axis=1),
        jnp.concatenate([prefix_position, question_position], axis=2),
        segment >= 0,
        segment,
    )
    tap = Tap("hidden", text.num_layers // 2)
    outputs = OutputSpec(taps=(tap,))
    stage = decoder.run_layers(language, text, rows, (0, text.num_layers), outputs=outputs)

    target = slots.shape[1] + exchanges.target
    hidden = jnp.take_along_axis(stage.hidden, target[..., None], axis=1)
    logits = decoder.logits(language, text, hidden)
    # The loss omits questions whose shapes are not shown.
    of_shape = jax.nn.one_hot(labels.shape, _MAX_SHAPES) > 0
    is_original = (labels.changed == 0)[..., None]
    is_shown = jnp.concatenate([of_shape.any(1), (of_shape & is_original).any(1)], axis=1)
    has_evidence = jnp.all(is_shown[:, None] | ~exchanges.evidence, axis=2)
    is_counted = jnp.take_along_axis(has_evidence, exchanges.question, axis=1)
    is_counted &= exchanges.label >= 0
    answer = jnp.maximum(exchanges.label, 0)
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, answer)
    total = jnp.sum(jnp.where(is_counted, losses, 0)) / jnp.maximum(jnp.sum(is_counted), 1)
    correct = (jnp.argmax(logits, -1) == answer) & is_counted
    # The first label of a question is its answer, the second one the end token.
    is_answer = is_counted & (jnp.arange(answer.shape[1]) % 2 == 0)
    family = jnp.take_along_axis(exchanges.family, exchanges.question, axis=1)
    scalars = {"answer_loss": total}
    for number, name in enumerate(FAMILIES):
        mask = is_answer & (family == number)
        scalars[name] = jnp.sum(correct & mask) / jnp.maximum(jnp.sum(mask), 1)

    # Slots of the shown visual tokens among the sorted slots of the row.
    rank = jnp.searchsorted(jnp.asarray(layout.text_slots), visual_slots) + jnp.arange(
        index.shape[1]
    )
    middle = jnp.take_along_axis(next(iter(stage.taps.values())), rank[..., None], axis=1)
    middle = middle * jax.lax.rsqrt(jnp.mean(middle**2, axis=-1, keepdims=True) + 1e-6)
    for name, label in _memory_labels(labels).items():
        head_logits = middle @ trained["heads"][name]
        mask = label >= 0
        losses = optax.softmax_cross_entropy_with_integer_labels(head_logits, jnp.maximum(label, 0))
        total += 0.3 * jnp.sum(jnp.where(mask, losses, 0)) / jnp.maximum(jnp.sum(mask), 1)
        hits = jnp.sum((jnp.argmax(head_logits, -1) == label) & mask)
        scalars[f"memory_{name}"] = hits / jnp.maximum(jnp.sum(mask), 1)
    return total, scalars


def _language_update(
    state: State, key: Array, piece, layout_arrays, recipe: Recipe, num_shown: int | None
):
    def loss(trained, layout, piece, piece_key):
        layout = PromptLayout(*layout)
        return language_loss(trained, recipe.backbone, layout, piece, piece_key, num_shown)

    grads, scalars = average_gradients(
        loss, state.trained, layout_arrays, piece, key, recipe.micro_batch, 1
    )
    return apply_gradients(recipe, state, grads), scalars


def pack_queries(
    tokenizer: Any, backbone: Qwen3_VL, numbers: Sequence[int]
) -> tuple[PromptLayout, Exchanges]:
    """Packs all questions about the clips of pretraining with the given numbers."""
    cached: dict[tuple[str, str], tuple] = {}
    rows, layout = [], None
    for number in numbers:
        scene, _, _ = random_clip(_clip_rng(number))
        row = Exchanges([], [], [], [], [], [], [], [])
        for question, query in enumerate(list_queries(scene)):
            entry = (query.text, query.answer)
            if entry not in cached:
                cached[entry] = encode_query(tokenizer, backbone, query)
            pieces, last, answer = cached[entry]
            layout = layout or make_layout(pieces, last[0])
            ids = [*last[1:], *answer]
            start = len(row.ids)
            row.ids.extend(ids)
            row.segment.extend([question + 1] * len(ids))
            row.offset.extend(range(len(ids)))
            row.target.extend(start + len(last) - 2 + place for place in range(len(answer)))
            row.label.extend(answer)
            row.question.extend([question] * len(answer))
            needed = [False] * (2 * _MAX_SHAPES)
            for shape, is_original in query.evidence:
                needed[shape + _MAX_SHAPES * is_original] = True
            row.evidence.append(needed)
            row.family.append(FAMILIES.index(query.family))
        rows.append(row)
    columns = Exchanges(*zip(*rows, strict=True))
    padding = Exchanges(0, -1, 0, 0, -1, 0, None, -1)
    arrays = {
        name: pad_batch(getattr(columns, name), getattr(padding, name), multiple=8)[0]
        for name in Exchanges._fields
        if name != "evidence"
    }
    evidence = np.zeros((*arrays["family"].shape, 2 * _MAX_SHAPES), bool)
    for row, needed in zip(evidence, columns.evidence, strict=True):
        row[: len(needed)] = needed
    return layout, Exchanges(**arrays, evidence=evidence)


# The run.


class Run(NamedTuple):
    """A run of pretraining.

    Attributes:
        workdir: folder of the run.
        backbone: the model.
        tokenizer: its tokenizer.
        clips: the clips.
        interrupt: records signals that stop the run.
    """

    workdir: Path
    backbone: Qwen3_VL
    tokenizer: Any
    clips: Clips
    interrupt: Interrupt

    def train(
        self,
        name: str,
        stage: Stage,
        state: State,
        update: Callable[[int, State, Int[np.ndarray, "b"]], tuple[State, dict[str, Array]]],
    ) -> State | None:
        """Trains a stage; returns None after an interruption."""
        num_clips = len(self.clips.labels) - _VALIDATION
        with contextlib.closing(Checkpoints(self.workdir / name, 1)) as checkpoints:
            first = 0
            if checkpoints.latest is not None:
                first, state, _ = checkpoints.restore(lambda _, template=state: template)
            steps = tqdm(range(first, stage.steps), name, stage.steps, initial=first, mininterval=5)
            for step in steps:
                rng = np.random.default_rng([_SEED, step])
                rows = np.sort(rng.choice(num_clips, stage.batch_size, replace=False))
                state, scalars = update(step, state, rows)
                if step % 20 == 0:
                    numbers = {key: round(float(value), 3) for key, value in scalars.items()}
                    with (self.workdir / f"{name}.jsonl").open("a") as file:
                        file.write(json.dumps({"step": step, **numbers}) + "\n")
                is_last, is_stopped = step + 1 == stage.steps, self.interrupt.requested
                if (step + 1) % 100 == 0 or is_last or is_stopped:
                    checkpoints.save(step + 1, state)
                if is_stopped and not is_last:
                    return None
        return state

    def recipe(self, stage: Stage, micro_batch: int) -> Recipe:
        """Returns the static part of a stage's updates."""
        return Recipe(self.backbone, stage.steps, stage.lr, micro_batch, 1, stage.muon_lr)

    def train_tower(self, stage: Stage, params: Params) -> Params | None:
        """Trains the tower, and the embeddings of the words that name the tokens."""
        recipe = self.recipe(stage, 2 * _SEEN_PATCHES)
        width = self.backbone.config.text.hidden_size
        words = {
            name: np.random.default_rng(number).normal(size=(1 + len(names), width))
            for number, (name, names) in enumerate(sorted(_WORDS.items()))
        }
        trained = {part: params[part] for part in _TOWER}
        trained["words"] = jax.tree.map(lambda x: jnp.float32(_EMBEDDING_STD * x), words)
        program = jax.jit(_tower_update, static_argnames="recipe", donate_argnames="state")
        names = sorted(_WORDS)
        fields = [TokenLabels._fields.index(name) for name in names]

        def update(step, state, rows):
            values = cut_patches(self.clips.frames[rows])
            values = values.reshape(len(rows), NUM_PATCHES, *values.shape[1:])
            labels = self.clips.labels[rows][:, fields]
            labels = labels.reshape(len(rows), len(fields), NUM_PATCHES, -1).swapaxes(1, 2)
            # The temporal patches with most shapes, with some chance for all others.
            rng = np.random.default_rng([_SEED, 1, step])
            score = (labels[:, :, 0] > 0).sum(2) + rng.uniform(0, 8, labels.shape[:2])
            chosen = np.argsort(-score, axis=1)[:, :_SEEN_PATCHES, None, None]
            values = np.take_along_axis(values, chosen, 1).reshape(-1, *values.shape[2:])
            labels = np.take_along_axis(labels, chosen, 1).reshape(-1, *labels.shape[2:])
            return program(state, values, labels, recipe=recipe)

        state = self.train("tower", stage, init_state(recipe, trained), update)
        if state is None:
            return None
        embedding = np.random.default_rng(9).normal(size=(len(self.tokenizer), width))
        embedding = np.float32(_EMBEDDING_STD * embedding)
        for name, names in _WORDS.items():
            for number, word in enumerate(names, 1):
                vector = np.asarray(state.trained["words"][name][number])
                for form in (word, word + "s"):
                    token = self.tokenizer.convert_tokens_to_ids(form)
                    if token != self.tokenizer.unk_token_id:
                        embedding[token] = vector
        # Wide embeddings would make the first logits too large.
        norm = {"scale": 0.25 * params["language"]["norm"]["scale"]}
        embed = {"embedding": jnp.asarray(embedding)}
        language = params["language"] | {"embed": embed, "norm": norm}
        parts = {part: state.trained[part] for part in _TOWER}
        return jax.device_get(params | parts | {"language": language})

    def encode_clips(self, params: Params) -> Float[np.ndarray, "i n e"]:
        """Returns the features of all clips, from a file if there is one."""
        file = self.workdir / "features.npy"
        if not file.is_file():
            program = jax.jit(lambda params, values: encode_patches(params, self.backbone, values))
            parts, size = [], 32
            for start in tqdm(range(0, len(self.clips.frames), size), "encoding", mininterval=5):
                values = cut_patches(np.asarray(self.clips.frames[start : start + size]))
                features = np.asarray(program(params, values), np.float16)
                parts.append(features.reshape(-1, NUM_TOKENS, features.shape[-1]))
            partial = self.workdir / "features.partial.npy"
            np.save(partial, np.concatenate(parts))
            os.replace(partial, file)
        return np.load(file, mmap_mode="r")

    def train_language(self, stage: Stage, params: Params) -> Params | None:
        """Trains the language model on the features of the tower."""
        recipe, features = self.recipe(stage, 8), self.encode_clips(params)
        layout, exchanges = pack_queries(
            self.tokenizer, self.backbone, range(len(self.clips.labels))
        )
        width = self.backbone.config.text.hidden_size
        heads = {name: jnp.zeros((width, size)) for name, size in _MEMORY_CLASSES.items()}
        trained = {"language": params["language"], "heads": heads}
        program = jax.jit(
            _language_update, static_argnames=("recipe", "num_shown"), donate_argnames="state"
        )
        sizes, fractions = zip(*_SHOWN, strict=True)

        def pieces(rows):
            values = [array[rows] for array in exchanges]
            return features[rows].astype(np.float32), self.clips.labels[rows], Exchanges(*values)

        def update(step, state, rows):
            rng = np.random.default_rng([_SEED, 2, step])
            num_shown = sizes[rng.choice(len(sizes), p=fractions)]
            if step < stage.steps // 8:
                num_shown = 48
            key = jax.random.fold_in(jax.random.key(_SEED), step)
            return program(
                state, key, pieces(rows), tuple(layout), recipe=recipe, num_shown=num_shown
            )

        state = self.train("language", stage, init_state(recipe, trained), update)
        if state is None:
            return None
        held_out = np.arange(len(features) - _VALIDATION, len(features))
        for num_shown in sizes:
            _, scalars = jax.jit(
                lambda trained, piece, num_shown=num_shown: language_loss(
                    trained, self.backbone, layout, piece, jax.random.key(0), num_shown
                )
            )(state.trained, pieces(held_out))
            print(num_shown, {name: round(float(value), 3) for name, value in scalars.items()})
        return jax.device_get(params | {"language": state.trained["language"]})


def pretrain(
    workdir: Path, num_clips: int, tower_stage: Stage, language_stage: Stage
) -> Path | int:
    """Trains the model, or resumes an interrupted run.

    Returns:
        The folder of the model, or the number of the signal that stopped the run.
    """
    clips = draw_clips(workdir / "clips", num_clips)
    tokenizer = make_tokenizer()
    backbone = make_backbone(tokenizer)
    params: PyTree = backbone.init_params(jax.random.key(0))
    with Interrupt() as interrupt:
        run = Run(workdir.resolve(), backbone, tokenizer, clips, interrupt)
        params = run.train_tower(tower_stage, params)
        if params is not None:
            params = run.train_language(language_stage, params)
        if params is None:
            return interrupt.number
    params = jax.tree.map(lambda leaf: np.asarray(leaf, np.float16), params)
    folder, partial = workdir / "model", workdir / "model.partial"
    shutil.rmtree(partial, ignore_errors=True)
    save_vlm(VLM(params, backbone, tokenizer, image_settings()), partial)
    shutil.rmtree(folder, ignore_errors=True)
    os.replace(partial, folder)
    print(f"Done: {folder}")
    return folder


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command and returns its exit status."""
    parser = Parser(prog=_NAME, description=__doc__)
    parser.add_argument("--workdir", required=True, type=Path, help="folder of the run")
    parser.add_argument("--clips", type=int, default=6144, help="number of clips to draw")
    parser.add_argument("--tower_steps", type=int, default=600, help="updates of the tower")
    text = "updates of the language model"
    parser.add_argument("--language_steps", type=int, default=4000, help=text)
    flags = parser.parse_args(arguments)
    result = pretrain(
        flags.workdir,
        flags.clips,
        Stage(flags.tower_steps, 16, 2e-3, 0.02),
        Stage(flags.language_steps, 24, 2e-3, 0.02),
    )
    return signal_status(result) if isinstance(result, int) else 0


if __name__ == "__main__":
    exit_with(_NAME, main, progress="stdout")
