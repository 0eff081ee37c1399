"""A small LLaVA from scratch, from a configuration to a folder in the Hugging Face layout."""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Float, Int

from stepprune_jax.checkpoints.load import VLM
from stepprune_jax.checkpoints.save import save_vlm
from stepprune_jax.config import ClipConfig, LlamaConfig, LlavaConfig
from stepprune_jax.data.images import ImageSettings
from stepprune_jax.data.llava import Sample, read_conversations
from stepprune_jax.generate.placement import jit_for_weights
from stepprune_jax.models import vlm
from stepprune_jax.pretrain.language import Words, language_loss
from stepprune_jax.pretrain.packing import Packed, pack
from stepprune_jax.pretrain.structure import init_tower, standardising_projector
from stepprune_jax.pretrain.tower import init_heads, tower_loss
from stepprune_jax.pretrain.vocabulary import build_tokenizer
from stepprune_jax.training.checkpoints import Checkpoints, claim, file_identity
from stepprune_jax.training.interrupt import Interrupt
from stepprune_jax.training.metrics import MetricsLog
from stepprune_jax.training.pixels import PixelCache

MODEL = "model"
PATCHES_FILE = "train_patches.npz"


class State(NamedTuple):
    """What a stage changes."""

    trained: Any
    moments: Any


class Recipe(NamedTuple):
    """Static part of a stage's update."""

    model: LlavaConfig
    steps: int
    lr: float
    micro_batch: int
    devices: int
    kept: int | None = None


def model_config(fields: Any, vocab_size: int, image_token: int) -> LlavaConfig:
    """The shape of the model that `config.model` describes."""
    vision = ClipConfig(
        hidden_size=fields.vision_width, intermediate_size=fields.vision_mlp,
        num_layers=fields.vision_layers, num_heads=fields.vision_heads,
        image_size=fields.image_size, patch_size=fields.patch_size,
    )  # fmt: skip
    heads = fields.text_heads
    text = LlamaConfig(
        vocab_size=vocab_size, hidden_size=fields.text_width, intermediate_size=fields.text_mlp,
        num_layers=fields.text_layers, num_heads=heads, num_kv_heads=heads,
        head_dim=fields.text_width // heads, max_positions=2048,
    )  # fmt: skip
    return LlavaConfig(
        vision=vision, text=text, feature_layer=fields.feature_layer, image_token_id=image_token,
        bos_token_id=1, eos_token_ids=(2,), pad_token_id=0,
    )  # fmt: skip


def _optimizer(recipe: Recipe) -> optax.GradientTransformation:
    warmup = min(50, recipe.steps // 4)
    rate = optax.warmup_cosine_decay_schedule(0, recipe.lr, warmup, recipe.steps, recipe.lr / 100)
    return optax.chain(
        optax.clip_by_global_norm(1.0), optax.adamw(rate, b2=0.98, weight_decay=0.02)
    )


def _accumulate(
    loss: Callable,
    trained: Any,
    frozen: Any,
    batch: Any,
    key: Array,
    micro_batch: int,
    devices: int,
) -> tuple[Any, dict[str, Array]]:
    """Mean gradient and scalars over small pieces of a batch, the pieces dealt out to all devices.

    Pieces that stay in a processor's cache are twice as fast as the whole batch at once, but too
    small for several cores; so every core takes pieces of its own, as a device.

    Args:
      loss: (trained, frozen, piece of the batch, key) -> loss and scalars.
      trained: What is differentiated.
      frozen: Other weights.
      batch: Arrays with one row per image.
      key: PRNG key; consumed.
      micro_batch: Rows of a piece.
      devices: How many share the pieces.
    """
    pieces = jax.tree.leaves(batch)[0].shape[0] // micro_batch
    cut = jax.tree.map(lambda x: x.reshape(pieces, micro_batch, *x.shape[1:]), batch)
    numbers = jnp.arange(pieces)

    def local(trained, frozen, cut, numbers, key):
        def piece(total, given):
            part, number = given
            value, grads = jax.value_and_grad(loss, has_aux=True)(
                trained, frozen, part, jax.random.fold_in(key, number)
            )
            return jax.tree.map(jnp.add, total, grads), value

        zeros = jax.tree.map(jnp.zeros_like, trained)
        total, (value, scalars) = jax.lax.scan(piece, zeros, (cut, numbers))
        total = jax.tree.map(lambda g: g / numbers.shape[0], total)
        scalars = jax.tree.map(lambda x: jnp.mean(x, axis=0), {"loss": value, **scalars})
        return jax.lax.pmean((total, scalars), "data")

    split = jax.shard_map(
        local, mesh=_mesh(devices), in_specs=(P(), P(), P("data"), P("data"), P()), out_specs=P(),
        check_vma=False,
    )  # fmt: skip
    return split(trained, frozen, cut, numbers, key)


def _mesh(devices: int) -> Mesh:
    return Mesh(jax.devices()[:devices], ("data",), axis_types=(AxisType.Auto,))


def _everywhere(tree: Any, devices: int) -> Any:
    """Copies to the devices that share the work."""
    return jax.device_put(tree, NamedSharding(_mesh(devices), P()))


def _apply(recipe: Recipe, state: State, grads: Any) -> State:
    updates, moments = _optimizer(recipe).update(grads, state.moments, state.trained)
    return State(optax.apply_updates(state.trained, updates), moments)


def _tower_update(key, state: State, pixels, labels, recipe: Recipe):
    """One update of the tower and its heads; nothing is drawn, the key says where it runs."""

    def loss(trained, _, part, __):
        return tower_loss(trained, recipe.model, *part)

    grads, scalars = _accumulate(
        loss, state.trained, (), (pixels, labels), key, recipe.micro_batch, recipe.devices
    )
    return _apply(recipe, state, grads), scalars


def _language_update(key, state: State, params, pixels, packed: Packed, words, recipe: Recipe):
    """One update of what `state` trains; `params` are the other weights, which may be none.

    So the key comes first: it says where it runs.
    """
    labels, tokens = words

    def loss(trained, frozen, part, piece_key):
        pixels, rows, labels = part
        params, prefix, tokens = frozen
        named = [Words(labels[name], tokens[name]) for name in sorted(tokens)]
        return language_loss(
            trained, params, recipe.model, piece_key, pixels, Packed(prefix, *rows), named,
            recipe.kept,
        )  # fmt: skip

    grads, scalars = _accumulate(
        loss, state.trained, (params, packed.prefix, tokens),
        (pixels, tuple(packed[1:]), labels), key, recipe.micro_batch, recipe.devices,
    )  # fmt: skip
    return _apply(recipe, state, grads), scalars


tower_update = jit_for_weights(_tower_update, ("recipe",), ("state",))
language_update = jit_for_weights(_language_update, ("recipe",), ("state",))


def batch_indices(seed: int, step: int, size: int, total: int) -> Int[np.ndarray, " b"]:
    """Rows of batch `step`; each epoch is a permutation of its own, without its last, short batch.

    Args:
      seed: Of the order.
      step: Number of the batch, from 0.
      size: Rows of a batch, at most `total`.
      total: Rows there are.
    """
    epoch, place = divmod(step, total // size)
    order = np.random.default_rng([seed, epoch]).permutation(total)
    return order[place * size : (place + 1) * size]


class _Stage(NamedTuple):
    """A stage for `_run_stage`."""

    name: str
    steps: int
    batch_size: int
    update: Callable[[int, State, Int[np.ndarray, " b"]], tuple[State, dict[str, Array]]]


def _run_stage(
    stage: _Stage, state: State, workdir: Path, config: Any, total: int, interrupt: Interrupt
) -> State | None:
    """Runs a stage to its end, or to an interruption, which gives None."""
    folder = workdir / stage.name
    checkpoints = Checkpoints(folder, 1)
    try:
        done = checkpoints.latest or 0
        if done:
            state = checkpoints.restore(state)
        if done == stage.steps:
            return state
        print(f"{stage.name}: step {done} of {stage.steps}", flush=True)
        log = MetricsLog(folder, done, stage.steps, stage.batch_size, False)
        for step in range(done, stage.steps):
            rows = batch_indices(config.seed, step, min(stage.batch_size, total), total)
            state, scalars = stage.update(step, state, rows)
            if step == done:
                jax.block_until_ready(scalars)
                log.start_clock(step + 1)
            last = step + 1 == stage.steps or interrupt.requested
            if (step + 1) % config.log_every == 0 or last:
                log.write(step + 1, {**scalars, "skipped": 0})
            if (step + 1) % config.checkpoint_every == 0 or last:
                checkpoints.save(step + 1, state)
            if interrupt.requested and step + 1 < stage.steps:
                print(f"Stopped in {stage.name}; the same command goes on from step {step + 1}")
                return None
        log.close()
        return state
    finally:
        checkpoints.close()


class _Data(NamedTuple):
    """What both stages read."""

    samples: list[Sample]
    pixels: PixelCache
    labels: dict[str, np.ndarray]
    words: dict[str, np.ndarray]

    def images(self, rows: Int[np.ndarray, " b"]) -> Float[np.ndarray, "b 3 H W"]:
        """Pixels of some samples."""
        return np.stack([self.pixels(self.samples[row].image) for row in rows])


def _read(folder: Path, settings: ImageSettings, side: int) -> _Data:
    samples = read_conversations(folder / "train.json", folder / "images")
    bare = next((sample for sample in samples if sample.image is None), None)
    if bare is not None:
        raise ValueError(
            f"{folder / 'train.json'}: sample {bare.index} ({bare.id}) has no image; all must have "
            "one here"
        )
    path, labels, words = folder / PATCHES_FILE, {}, {}
    if path.is_file():
        with np.load(path) as file:
            labels = {name: file[name] for name in file.files}
        words = {k: labels.pop(k) for k in list(labels) if k.startswith("words_")}
        for name, array in labels.items():
            if len(array) != len(samples):
                raise ValueError(
                    f"{path}: {name} has {len(array)} rows, train.json has {len(samples)} samples"
                )
    return _Data(samples, PixelCache(settings, side, 4 << 30), labels, words)


def _recipe(config: Any, model: LlavaConfig, fields: Any, kept: int | None = None) -> Recipe:
    pieces = fields.batch_size // config.micro_batch
    devices = math.gcd(pieces, jax.device_count())
    return Recipe(model, fields.steps, fields.lr, config.micro_batch, devices, kept)


def _train_tower(config, workdir, model, params, data: _Data, interrupt) -> dict | None:
    """The tower's weights after their stage, or as they are where there are no labels."""
    if not data.labels or not config.tower.steps:
        return params["vision"]
    recipe = _recipe(config, model, config.tower)
    heads = init_heads(data.labels, model.vision.hidden_size)
    trained, key = {"vision": params["vision"], "heads": heads}, jax.random.key(config.seed)

    def update(step, state, rows):
        labels = {name: array[rows] for name, array in data.labels.items()}
        return tower_update(key, state, data.images(rows), labels, recipe=recipe)

    stage = _Stage("tower", config.tower.steps, config.tower.batch_size, update)
    state = State(trained, _optimizer(recipe).init(trained))
    state, key = _everywhere((state, key), recipe.devices)
    state = _run_stage(stage, state, workdir, config, len(data.samples), interrupt)
    return None if state is None else state.trained["vision"]


def kept_at(config: Any, step: int) -> int | None:
    """How many visual tokens a step of the second stage shows; None means all."""
    random = np.random.default_rng([config.seed, 1, step])
    if random.random() >= config.language.thinned_share:
        return None
    return int(random.choice(config.language.kept))


def word_tokens(tokenizer: Any, words: dict[str, np.ndarray]) -> dict[str, Int[np.ndarray, "c"]]:
    """Tokens of the words for classes of patches, by the labels' name; -1 without a word."""
    unknown = tokenizer.unk_token_id

    def token(word: str) -> int:
        found = tokenizer.convert_tokens_to_ids(word) if word else unknown
        return -1 if found in (None, unknown) else found

    return {
        name.replace("words_", "class_", 1): np.asarray([token(str(w)) for w in array], np.int32)
        for name, array in words.items()
    }


def _start_language(params: dict, model: LlavaConfig, data: _Data) -> dict:
    """Weights on scales that a small model learns from: embeddings as wide as what layers add."""
    pixels = data.images(np.arange(min(64, len(data.samples))))
    features = jax.jit(vlm.encode_image, static_argnums=1)(params, model, pixels)[0]
    language = dict(params["language"])
    language["embed"] = {"embedding": language["embed"]["embedding"] * 25}
    projector = standardising_projector(params["projector"], features)
    return params | {"language": language, "projector": projector}


def _train_language(config, workdir, model, params, packed, tokens, data: _Data, interrupt):
    """All weights after the second stage."""
    params = jax.device_get(params)  # the stages may share the work among different devices
    params = _start_language(params, model, data)
    parts = ["projector", "language"] + ["vision"] * config.language.train_tower
    trained = {name: params[name] for name in parts}
    frozen = {name: params[name] for name in params if name not in parts}
    recipes = {k: _recipe(config, model, config.language, k) for k in (None, *config.language.kept)}
    key = jax.random.fold_in(jax.random.key(config.seed), 2)

    def update(step, state, rows):
        part = Packed(packed.prefix, *(array[rows] for array in packed[1:]))
        labels = {name: data.labels[name][rows].astype(np.int32) for name in tokens}
        return language_update(
            jax.random.fold_in(key, step), state, frozen, data.images(rows), part, (labels, tokens),
            recipe=recipes[kept_at(config, step)],
        )  # fmt: skip

    stage = _Stage("language", config.language.steps, config.language.batch_size, update)
    state = State(trained, _optimizer(recipes[None]).init(trained))
    state, frozen, key = _everywhere((state, frozen, key), recipes[None].devices)
    state = _run_stage(stage, state, workdir, config, len(data.samples), interrupt)
    return None if state is None else frozen | state.trained


def pretrain(config: Any, workdir: str | Path, folder: str | Path) -> Path | None:
    """Trains a small LLaVA on a data folder, or goes on where an interrupted run stopped.

    Args:
      config: See `configs/pretrain_shapes.py`.
      workdir: Folder of the run: stages with their metrics and checkpoints, and at the end `model`.
      folder: Data in LLaVA's format: `train.json`, `images/`, and, for the tower's own stage,
        `train_patches.npz`.

    Returns:
      The model's folder, or None after an interruption.

    Raises:
      FileNotFoundError: Data or a picture is missing.
      ValueError: Bad data, or a folder of another run.
    """
    workdir, folder = Path(workdir).resolve(), Path(folder)
    side = config.model.image_size
    settings = ImageSettings(resize_to=side, crop_to=(side, side))
    data = _read(folder, settings, side)
    claim(workdir, config, "from scratch", file_identity(folder / "train.json"))
    tokenizer = build_tokenizer(turn for sample in data.samples for turn in sample.turns)
    model = model_config(config.model, len(tokenizer), tokenizer.convert_tokens_to_ids("<image>"))
    packed = pack(tokenizer, data.samples)
    params = vlm.init_params(jax.random.key(config.seed), model)
    params["vision"] = init_tower(jax.random.key(config.seed), model.vision)
    with Interrupt() as interrupt:
        vision = _train_tower(config, workdir, model, params, data, interrupt)
        if vision is None:
            return None
        params["vision"] = vision
        params = _train_language(
            config, workdir, model, params, packed, word_tokens(tokenizer, data.words), data,
            interrupt,
        )  # fmt: skip
        if params is None:
            return None
    params = jax.tree.map(lambda leaf: leaf.astype(config.dtype), params)
    if not (workdir / MODEL / "config.json").is_file():
        save_vlm(VLM(params, model, tokenizer, settings), workdir / MODEL)
    print(f"Done: {workdir / MODEL}", flush=True)
    return workdir / MODEL
