"""A small LLaVA from scratch, from a configuration to a folder in the Hugging Face layout."""

import contextlib
import dataclasses
import math
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
from jaxtyping import Array, Int

from stepprune_jax.checkpoints.identity import file_identity
from stepprune_jax.checkpoints.load import VLM, load_vlm
from stepprune_jax.checkpoints.save import save_vlm
from stepprune_jax.models import vlm
from stepprune_jax.models.llava.config import ClipConfig, LlamaConfig, LlavaConfig
from stepprune_jax.models.llava.images import ImageSettings
from stepprune_jax.pretrain.data import Data, batch_indices, read, word_tokens
from stepprune_jax.pretrain.language import Shown
from stepprune_jax.pretrain.mentions import Told, init_mention_heads, place_mentions
from stepprune_jax.pretrain.packing import Packed, pack
from stepprune_jax.pretrain.settings import check_config
from stepprune_jax.pretrain.structure import init_tower, standardising_projector
from stepprune_jax.pretrain.tower import init_heads
from stepprune_jax.pretrain.update import (
    Recipe,
    State,
    everywhere,
    language_update,
    start,
    tower_update,
)
from stepprune_jax.pretrain.vocabulary import build_tokenizer, take_rows
from stepprune_jax.training.checkpoints import Checkpoints, claim
from stepprune_jax.training.interrupt import Interrupt
from stepprune_jax.training.metrics import MetricsLog
from stepprune_jax.user_input import user_input
from stepprune_jax.visualize.training import draw_training

MODEL = "model"
NOISY = "noisy"
MENTION_HEADS = "mention_heads"
EVERYTHING = Shown()


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
        head_dim=fields.text_width // heads, max_positions=2048, rope_theta=fields.rope_theta,
    )  # fmt: skip
    return LlavaConfig(
        vision=vision, text=text, feature_layer=fields.feature_layer, image_token_id=image_token,
        bos_token_id=1, eos_token_ids=(2,), pad_token_id=0,
    )  # fmt: skip


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
    with contextlib.closing(Checkpoints(folder, 1)) as checkpoints:
        done = 0
        if checkpoints.latest is not None:
            done, state, _ = checkpoints.restore(state)
        if done == stage.steps:
            return state
        print(f"{stage.name}: step {done} of {stage.steps}", flush=True)
        with contextlib.closing(MetricsLog(folder, done, stage.steps, stage.batch_size)) as log:
            for step in range(done, stage.steps):
                rows = batch_indices(config.seed, step, stage.batch_size, total)
                state, scalars = stage.update(step, state, rows)
                if step == done:
                    jax.block_until_ready(scalars)
                    log.start_clock(step + 1)
                end = step + 1 == stage.steps
                if (step + 1) % config.log_every == 0 or end:
                    log.write(step + 1, scalars)
                if (step + 1) % config.checkpoint_every == 0 or end or interrupt.requested:
                    checkpoints.save(step + 1, state)
                if interrupt.requested and not end:
                    print(f"Stopped in {stage.name}; the same command goes on from {step + 1}")
                    return None
    return state


def _recipe(config: Any, model: LlavaConfig, fields: Any, shown: Shown = EVERYTHING) -> Recipe:
    pieces = fields.batch_size // config.micro_batch
    devices = math.gcd(pieces, jax.device_count())
    muon_lr = fields.get("muon_lr", 0.0)
    return Recipe(model, fields.steps, fields.lr, config.micro_batch, devices, muon_lr, shown)


def _train_tower(config, workdir, model, params, data: Data, interrupt) -> dict | None:
    """The tower's weights after their stage, or as they are where there are no labels."""
    if not data.labels or not config.tower.steps:
        return params["vision"]
    recipe = _recipe(config, model, config.tower)
    told = {name: a for name, a in data.labels.items() if not name.startswith("share_")}
    heads = init_heads(told, model.vision.hidden_size)
    trained, key = {"vision": params["vision"], "heads": heads}, jax.random.key(config.seed)

    def update(step, state, rows):
        labels = {name: array[rows] for name, array in told.items()}
        return tower_update(key, state, data.images(rows), labels, recipe=recipe)

    stage = _Stage("tower", config.tower.steps, config.tower.batch_size, update)
    state = start(recipe, trained)
    state, key = everywhere((state, key), recipe.devices)
    state = _run_stage(stage, state, workdir, config, len(data.samples), interrupt)
    return None if state is None else state.trained["vision"]


def kept_at(config: Any, stage: str, step: int) -> int | str | None:
    """How many visual tokens a step of a stage shows; None means all, `NOISY` all with noise.

    Every other step of the stage "noise" has noise, and `thinned_share` of the others thins, as in
    the stage "language" behind its first steps.
    """
    late = stage == "noise"
    if late and step % 2:
        return NOISY
    random = np.random.default_rng([config.seed, 3 if late else 1, step])
    whole = not late and step < config.language.whole_steps
    if whole or random.random() >= config[stage].thinned_share:
        return None
    return int(random.choice(config.language.kept))


def _start_language(params: dict, model: LlavaConfig, data: Data) -> dict:
    """Weights on scales that a small model learns from: embeddings as wide as what layers add."""
    pixels = data.images(np.arange(min(64, len(data.samples))))
    features = jax.jit(vlm.encode_image, static_argnums=1)(params, model, pixels)[0]
    language = dict(params["language"])
    language["embed"] = {"embedding": language["embed"]["embedding"] * 25}
    projector = standardising_projector(params["projector"], features)
    return params | {"language": language, "projector": projector}


def _wide(label: np.ndarray) -> np.ndarray:
    """Labels as programs take them."""
    return label.astype(np.float32 if label.dtype.kind == "f" else np.int32)


def _train_language(
    name, config, workdir, model, params, packed, told, tokens, data: Data, interrupt
):  # fmt: skip
    """All weights after the stage "language" or "noise", heads of mentions among them."""
    fields, number = config[name], ("language", "noise").index(name)
    if told is not None and MENTION_HEADS not in params:
        params = params | {MENTION_HEADS: init_mention_heads(told, model.text.hidden_size)}
    parts = {"projector", "language"} | ({"vision"} if config.language.train_tower else set())
    parts |= params.keys() & {MENTION_HEADS}
    trained = {name: params[name] for name in params if name in parts}
    frozen = {name: params[name] for name in params if name not in parts}
    often = {"taste": fields.taste, "silence": name == "noise"}
    ways = {k: Shown(k, **often) for k in (None, *config.language.kept)}
    ways[NOISY] = Shown(noisy=True, **often)
    recipes = {k: _recipe(config, model, fields, shown) for k, shown in ways.items()}
    key = jax.random.fold_in(jax.random.key(config.seed), 2 + number)

    def update(step, state, rows):
        part = Packed(packed.prefix, *(array[rows] for array in packed[1:]))
        spoken = told and Told(*(array[rows] for array in told))
        labels = {name: _wide(data.labels[name][rows]) for name in tokens}
        return language_update(
            jax.random.fold_in(key, step), state, frozen, data.images(rows), part, spoken,
            (labels, tokens), recipe=recipes[kept_at(config, name, step)],
        )  # fmt: skip

    stage = _Stage(name, fields.steps, fields.batch_size, update)
    state = start(recipes[None], trained)
    state, frozen, key = everywhere((state, frozen, key), recipes[None].devices)
    state = _run_stage(stage, state, workdir, config, len(data.samples), interrupt)
    return None if state is None else frozen | state.trained


def _first_model(config: Any, data: Data) -> tuple[dict, LlavaConfig, Any]:
    """Weights, shape and tokenizer to start from: random ones, or those of `config.init`.

    Of the latter the vocabulary is extended by words of the data that it lacks.
    """
    texts = [turn for sample in data.samples for turn in sample.turns]
    found = load_vlm(config.init, dtype=np.float32) if config.init else None
    if found is not None:
        texts += [word for word in found.tokenizer.get_vocab() if word.isalnum()]
    tokenizer = build_tokenizer(texts)
    sizes = (len(tokenizer), tokenizer.convert_tokens_to_ids("<image>"))
    key = jax.random.key(config.seed)
    if found is not None:
        language, new = take_rows(key, found.params["language"], found.tokenizer, tokenizer)
        print(f"words that {config.init} lacks: {', '.join(new) or 'none'}", flush=True)
        text = dataclasses.replace(found.config.text, vocab_size=sizes[0])
        model = dataclasses.replace(found.config, text=text, image_token_id=sizes[1])
        return found.params | {"language": language}, model, tokenizer
    model = model_config(config.model, *sizes)
    params = vlm.init_params(key, model)
    params["vision"] = init_tower(jax.random.key(config.seed), model.vision)
    return params, model, tokenizer


def pretrain(config: Any, workdir: str | Path, folder: str | Path) -> Path | None:
    """Trains a small LLaVA on a data folder, or goes on where an interrupted run stopped.

    Args:
      config: See `configs/pretrain_shapes.py`.
      workdir: Folder of the run: stages with their metrics and checkpoints, and at the end `model`
        and the curves of the second stage, `language.png`.
      folder: Data in LLaVA's format: `train.json`, `images/`, and, for the tower's own stage,
        `train_patches.npz`, and for what questions speak of, `train_mentions.npz`.

    Returns:
      The model's folder, or None after an interruption.

    Raises:
      FileNotFoundError: Data or a picture is missing.
      ValueError: Bad data, or a folder of another run.
    """
    workdir, folder = Path(workdir).expanduser().resolve(), Path(folder).expanduser()
    with user_input():
        check_config(config)
        side = config.model.image_size
        settings = ImageSettings(resize_to=side, crop_to=(side, side))
        data = read(config, folder, settings)
        claim(workdir, config, "from scratch", file_identity(folder / "train.json"))
        params, model, tokenizer = _first_model(config, data)
        packed = pack(tokenizer, data.samples)
        told = data.mentions and place_mentions(tokenizer, packed, data.mentions)
    with Interrupt() as interrupt:
        vision = _train_tower(config, workdir, model, params, data, interrupt)
        if vision is None:
            return None
        params["vision"] = vision
        tokens = word_tokens(tokenizer, data.words)
        params = jax.device_get(params)  # stages may share the work among different devices
        if not config.init:
            params = _start_language(params, model, data)
        for name in ["language"] + ["noise"] * (config.noise.steps > 0):
            params = _train_language(
                name, config, workdir, model, params, packed, told, tokens, data, interrupt
            )
            if params is None:
                return None
            params = jax.device_get(params)
    params.pop(MENTION_HEADS, None)
    draw_training(workdir / "language.png", workdir / "language" / "metrics.jsonl")
    params = jax.tree.map(lambda leaf: leaf.astype(config.dtype), params)
    made = _save(VLM(params, model, tokenizer, settings), workdir)
    print(f"Done: {made}", flush=True)
    return made


def _save(model: VLM, workdir: Path) -> Path:
    """Writes the model's folder, unless it is there; it is there as a whole or not at all."""
    folder, partial = workdir / MODEL, workdir / f"{MODEL}.partial"
    if not folder.exists():
        shutil.rmtree(partial, ignore_errors=True)
        save_vlm(model, partial)
        os.replace(partial, folder)
    return folder
