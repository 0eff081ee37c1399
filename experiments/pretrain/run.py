"""Trains a small model from scratch, and writes it as a folder in the Hugging Face layout."""

import contextlib
import math
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
from jaxtyping import Array, Int

from experiments.pretrain.conversations import Sample
from experiments.pretrain.data import Data, batch_indices, read_data, read_samples, word_tokens
from experiments.pretrain.images import token_mask
from experiments.pretrain.language import Display
from experiments.pretrain.mentions import PlacedMentions, init_mention_heads, place_mentions
from experiments.pretrain.packing import Packed, pack
from experiments.pretrain.settings import Pretraining, StageSettings
from experiments.pretrain.small import SMALL, small_of
from experiments.pretrain.tower import init_heads
from experiments.pretrain.update import (
    Recipe,
    State,
    init_state,
    language_update,
    replicate,
    tower_update,
)
from experiments.pretrain.vocabulary import build_tokenizer
from stepprune_jax.checkpoints.identity import file_identity
from stepprune_jax.checkpoints.load import VLM
from stepprune_jax.checkpoints.save import save_vlm
from stepprune_jax.data.encoding import ConversationEncoder
from stepprune_jax.models.backbone import Backbone
from stepprune_jax.models.stack import Params
from stepprune_jax.parallel import distributed
from stepprune_jax.user_input import local_path
from stepprune_jax.workdir.checkpoints import Checkpoints, Interrupt, claim
from stepprune_jax.workdir.metrics import MetricsLog

MODEL = "model"
NOISY = "noisy"
MENTION_HEADS = "mention_heads"
ALL_TOKENS = Display()


class _Pretrainer(NamedTuple):
    """Trains the stages of a run.

    Attributes:
        settings: settings of the run.
        workdir: folder of the run.
        backbone: the model.
        data: images, conversations and labels.
        packed: the conversations as tokens.
        mentions: mentions of the questions; None without labels.
        tokens: tokens of the classes of patches, by label.
        interrupt: records signals that stop the run.
    """

    settings: Pretraining
    workdir: Path
    backbone: Backbone
    data: Data
    packed: Packed
    mentions: PlacedMentions | None
    tokens: dict[str, Int[np.ndarray, "c"]]
    interrupt: Interrupt

    def recipe(self, stage: StageSettings, display: Display = ALL_TOKENS) -> Recipe:
        """Returns the static part of a stage's updates."""
        micro_batch = self.settings.micro_batch
        return Recipe(
            backbone=self.backbone,
            steps=stage.steps,
            lr=stage.lr,
            micro_batch=micro_batch,
            devices=math.gcd(stage.batch_size // micro_batch, jax.device_count()),
            muon_lr=stage.muon_lr or 0.0,
            display=display,
        )

    def train_stage(
        self,
        name: str,
        stage: StageSettings,
        state: State,
        update: Callable[[int, State, Int[np.ndarray, " b"]], tuple[State, dict[str, Array]]],
    ) -> State | None:
        """Trains a stage.

        Args:
            name: name of the stage and its folder.
            stage: settings of the stage.
            state: the state before the first update.
            update: maps a step, a state and the rows of a batch to the next state and scalars.

        Returns:
            The final state, or None after an interruption.
        """
        run, folder = self.settings, self.workdir / name
        with contextlib.closing(Checkpoints(folder, 1)) as checkpoints:
            num_done = 0
            if checkpoints.latest is not None:
                num_done, state, _ = checkpoints.restore(lambda _, template=state: template)
            if num_done == stage.steps:
                return state
            distributed.say(f"{name}: step {num_done} of {stage.steps}")
            log = MetricsLog(folder, num_done, stage.steps, stage.batch_size)
            with contextlib.closing(log):
                for step in range(num_done, stage.steps):
                    rows = batch_indices(run.seed, step, stage.batch_size, self.data.groups)
                    state, scalars = update(step, state, rows)
                    if step == num_done:
                        jax.block_until_ready(scalars)
                        log.start_clock(step + 1)
                    is_last = step + 1 == stage.steps
                    if (step + 1) % run.log_every == 0 or is_last:
                        log.write(step + 1, scalars)
                    is_stopped = self.interrupt.requested
                    if (step + 1) % run.checkpoint_every == 0 or is_last or is_stopped:
                        checkpoints.save(step + 1, state)
                    if is_stopped and not is_last:
                        distributed.say(
                            f"Stopped in {name}; the same command resumes after {step + 1}"
                        )
                        return None
        return state

    def train_tower(self, params: Params) -> Params | None:
        """Trains the tower on patch labels; returns None after an interruption."""
        stage, labels = self.settings.tower, self.data.labels
        if not labels or not stage.steps:
            return params
        recipe, small, config = self.recipe(stage), small_of(self.backbone), self.backbone.config
        unused = ("share_",) if config.class_token_block is not None else ("share_", "image_")
        labels = {name: array for name, array in labels.items() if not name.startswith(unused)}
        heads = init_heads(labels, config.feature_width)
        trained = {part: params[part] for part in small.TOWER} | {"heads": heads}
        state = init_state(recipe, trained)
        state, key = replicate((state, jax.random.key(self.settings.seed)), recipe.devices)

        def update(step, state, rows):
            batch = {name: array[rows] for name, array in labels.items()}
            return tower_update(key, state, self.data.images(rows), batch, recipe=recipe)

        state = self.train_stage("tower", stage, state, update)
        if state is None:
            return None
        return params | {part: state.trained[part] for part in small.TOWER}

    def train_language(self, name: str, params: Params) -> Params | None:
        """Trains the stage "language" or "noise"; returns None after an interruption."""
        run, packed = self.settings, self.packed
        stage, number = getattr(run, name), ("language", "noise").index(name)
        if self.mentions is not None and MENTION_HEADS not in params:
            heads = init_mention_heads(self.mentions, self.backbone.config.text.hidden_size)
            params = params | {MENTION_HEADS: heads}
        parts = {*small_of(self.backbone).CONNECTOR, "language"}
        parts |= {"vision"} if run.language.train_tower else set()
        parts |= params.keys() & {MENTION_HEADS}
        trained = {name: params[name] for name in params if name in parts}
        frozen = {name: params[name] for name in params if name not in parts}
        options = {"taste": stage.taste, "names_noise": name == "noise"}
        displays = {kept: Display(kept, **options) for kept in (None, *run.language.kept)}
        displays[NOISY] = Display(is_noisy=True, **options)
        recipes = {kept: self.recipe(stage, display) for kept, display in displays.items()}
        key = jax.random.fold_in(jax.random.key(run.seed), 2 + number)
        state = init_state(recipes[None], trained)
        state, frozen, key = replicate((state, frozen, key), recipes[None].devices)

        def update(step, state, rows):
            mentions = self.mentions and PlacedMentions(*(array[rows] for array in self.mentions))
            labels = {name: _widen(self.data.labels[name][rows]) for name in self.tokens}
            return language_update(
                jax.random.fold_in(key, step),
                state,
                frozen,
                self.data.images(rows),
                Packed(packed.prefix, *(array[rows] for array in packed[1:])),
                mentions,
                (labels, self.tokens),
                recipe=recipes[kept_at(run, name, step)],
            )

        state = self.train_stage(name, stage, state, update)
        return None if state is None else frozen | state.trained


def kept_at(run: Pretraining, stage: str, step: int) -> int | str | None:
    """Returns how many visual tokens an update shows.

    Every second update of the stage "noise" has noise. A fraction `thinned_share` of all other
    updates thins images, except for the first updates of the stage "language".

    Returns:
        A number of tokens; None for all tokens; or `NOISY` for all tokens mixed with noise.
    """
    is_noise_stage = stage == "noise"
    if is_noise_stage and step % 2:
        return NOISY
    rng = np.random.default_rng([run.seed, 3 if is_noise_stage else 1, step])
    shows_all = not is_noise_stage and step < run.language.whole_steps
    if shows_all or rng.random() >= getattr(run, stage).thinned_share:
        return None
    return int(rng.choice(run.language.kept))


def _start_language(params: dict, backbone: Backbone, data: Data) -> dict:
    """Rescales embeddings to the scale of layer outputs, and connects the tower's features."""
    images = data.images(np.arange(min(64, len(data.samples))))
    features = jax.jit(backbone.encode_image)(params, images.pixels)[0]
    language = dict(params["language"])
    language["embed"] = {"embedding": language["embed"]["embedding"] * 25}
    real = token_mask(backbone, images, features.shape[1])
    return small_of(backbone).connect(params | {"language": language}, features, real)


def _widen(label: np.ndarray) -> np.ndarray:
    """Converts labels to float32 or int32."""
    return label.astype(np.float32 if label.dtype.kind == "f" else np.int32)


def _init_model(run: Pretraining, samples: list[Sample]) -> tuple[dict, Backbone, Any]:
    """Returns randomly initialized weights, the backbone, and the tokenizer."""
    small = SMALL[run.model.family]
    texts = [turn for sample in samples for turn in sample.turns]
    tokenizer = build_tokenizer(texts, small.TEMPLATE)
    backbone = small.make_backbone(run.model, tokenizer)
    return small.init_params(jax.random.key(run.seed), backbone), backbone, tokenizer


def pretrain(run: Pretraining, workdir: str | Path, folder: str | Path) -> Path | int:
    """Trains a small model on a data folder, or resumes an interrupted run.

    Args:
        run: settings of the run.
        workdir: folder of the run.
        folder: the data folder.

    Returns:
        The folder of the model, or the number of the signal that stopped the run.
    """
    workdir, folder = local_path(workdir).resolve(), local_path(folder)
    samples = read_samples(folder)
    params, backbone, tokenizer = _init_model(run, samples)
    images = SMALL[run.model.family].image_settings(run.model)
    data = read_data(run, folder, samples, backbone, images)
    claim(workdir, run, "from scratch", file_identity(folder / "train.json"))
    encoder = ConversationEncoder(tokenizer, backbone.place_images, backbone.conversation)
    packed = pack(encoder, data.samples)
    mentions = data.mentions and place_mentions(tokenizer, packed, data.mentions)
    tokens = word_tokens(tokenizer, data.words)
    with Interrupt() as interrupt:
        pretrainer = _Pretrainer(
            settings=run,
            workdir=workdir,
            backbone=backbone,
            data=data,
            packed=packed,
            mentions=mentions,
            tokens=tokens,
            interrupt=interrupt,
        )
        params = pretrainer.train_tower(params)
        if params is None:
            return interrupt.number
        # Fetched to the host, because stages may use different devices.
        params = jax.device_get(params)
        params = _start_language(params, backbone, data)
        for name in ["language"] + ["noise"] * (run.noise.steps > 0):
            params = pretrainer.train_language(name, params)
            if params is None:
                return interrupt.number
            params = jax.device_get(params)
    params.pop(MENTION_HEADS, None)
    params = jax.tree.map(lambda leaf: leaf.astype(run.dtype), params)
    model_folder = _save_model(VLM(params, backbone, tokenizer, images), workdir)
    distributed.say(f"Done: {model_folder}")
    return model_folder


def _save_model(model: VLM, workdir: Path) -> Path:
    """Writes the folder of the model atomically, unless it exists."""
    folder, partial = workdir / MODEL, workdir / f"{MODEL}.partial"
    if not folder.exists():
        shutil.rmtree(partial, ignore_errors=True)
        save_vlm(model, partial)
        os.replace(partial, folder)
    return folder
