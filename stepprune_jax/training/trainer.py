"""The state of a training run, and the updates that change it."""

import dataclasses
import functools
import itertools
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from stepprune_jax.checkpoints.load import VLM
from stepprune_jax.checkpoints.policy import config_metadata
from stepprune_jax.data.json_files import JsonObject
from stepprune_jax.models.images import Pixels, stack_images
from stepprune_jax.parallel import distributed
from stepprune_jax.parallel.placement import place_rows, replicate_like
from stepprune_jax.policy import FeatureStats
from stepprune_jax.policy.jax_settings import THREEFRY, jax_defaults
from stepprune_jax.selectors import Policy, SubsetGain
from stepprune_jax.selectors.base import Weights
from stepprune_jax.selectors.rloo import SubsetRewards, subset_gain
from stepprune_jax.training import step
from stepprune_jax.training.batches import Batches
from stepprune_jax.training.recipes import TRIAL_SHARE, Phase
from stepprune_jax.training.settings import Run
from stepprune_jax.training.step_config import StepConfig
from stepprune_jax.workdir.checkpoints import Checkpoints

# Number of training questions on which `measure_subset_gain` samples subsets: enough for a standard
# error of the gain well below `selectors.rloo.MIN_GAIN`.
_NUM_TRIED_QUESTIONS = 512


class Trainer:
    """The trainable state of a run, and the updates that change it.

    Attributes:
        run: settings of the run.
        done: number of updates done.
        config: static settings of the last update; before any update, the settings of the first.
        state: weights, optimizer state and counters.
        stats: statistics of the tower's features: token features, then deep features.
        stream: the batches of the updates to come. The caller must close it.
    """

    def __init__(self, run: Run, model: VLM, configs: Sequence[StepConfig], batches: Batches):
        """Creates random weights. The caller must call `init` or `restore` next.

        Args:
            run: settings of the run.
            model: the frozen model.
            configs: static part of the updates of each phase, in the order of the phases.
            batches: the batches of the run.
        """
        self.run, self._model, self._batches = run, model, batches
        seed_key = jax.random.key(run.seed, impl=THREEFRY)
        self._init_key, update_key = (jax.random.fold_in(seed_key, i) for i in range(2))
        self.done, self._configs, self.config = 0, configs, configs[0]
        self.state = self._make_state()
        stats = FeatureStats.start(model.config.token_width)
        arrays = stats, jax.random.key_data(update_key)
        self.stats, self._key_data = replicate_like(model.params, arrays)

    @property
    def phase(self) -> Phase:
        """The phase of the last update."""
        return self.config.phase

    def _make_state(self) -> step.State:
        """Initializes a state of training for the current `config`, on the model's devices."""
        with jax_defaults():
            state = jax.jit(step.init_state, static_argnums=1)(self._init_key, self.config)
        return replicate_like(self._model.params, state)

    def _enter(self, config: StepConfig) -> None:
        """Begins a phase with the current weights, and a new state of optimizer and objective."""
        self.config = config
        new_state = self._make_state()
        self.state = self.state._replace(optimizer=new_state.optimizer, method=new_state.method)

    def init(self, start: tuple[Weights, FeatureStats] | None = None) -> None:
        """Prepares the first update of a new run.

        Args:
            start: first weights, and statistics of the features; None keeps the random weights and
                computes the statistics from training images.
        """
        has_deep_features = self.config.backbone.config.num_deepstack_layers > 0
        if start is None or has_deep_features:
            self._gather_stats()
        if start is not None:
            params, stats = replicate_like(self._model.params, start)
            self.state = self.state._replace(params=params)
            self.stats = stats.continued(self.stats) if has_deep_features else stats
        self.stream = self._batches.stream(self.run.steps)

    def measure_subset_gain(
        self, config: StepConfig, should_stop: Callable[[], bool]
    ) -> SubsetGain | None:
        """Measures how much sampled subsets of tokens help to answer the first training questions.

        Args:
            config: static part of updates by RLOO.
            should_stop: returns whether the run must stop; called before each batch.

        Returns:
            The mean gain over at most one epoch. None if `should_stop` returned True.
        """
        # The measurement does not depend on the length of the phase. A constant length lets runs of
        # any length share the compiled program.
        config = dataclasses.replace(
            config, phase=dataclasses.replace(config.phase, first=0, last=1)
        )
        key = jax.random.fold_in(jax.random.key(self.run.seed, impl=THREEFRY), 2)
        batch_size, epoch_size = self.run.batch_size, len(self._batches)
        num_batches = -(-min(_NUM_TRIED_QUESTIONS, epoch_size) // batch_size)
        rewards = []
        for batch_index in range(min(num_batches, self.run.steps)):
            if should_stop():
                return None
            read_batch = functools.partial(self._batches.__getitem__, batch_index)
            local_batch = distributed.together(read_batch)
            batch = step.place_batch(config.forward.mesh, local_batch, batch_size)
            batch_rewards = step.measure_subset_gain(
                self._model.params,
                self.state.params,
                self.stats,
                batch,
                jax.random.fold_in(key, batch_index),
                config=config,
            )
            # Waiting for the rewards limits the number of batches in device memory. The last batch
            # may continue into another epoch; these rows are dropped, so each question counts once.
            num_remaining = epoch_size - batch_index * batch_size
            batch_rewards = jax.device_get(batch_rewards)
            rewards.append(SubsetRewards(*(array[:num_remaining] for array in batch_rewards)))
        return subset_gain(rewards)

    def try_warm_start(
        self, config: StepConfig, rloo_config: StepConfig, should_stop: Callable[[], bool]
    ) -> SubsetGain | None:
        """Makes a trial of the warm start, and measures the subsets that the policy then samples.

        The trial uses the batches after those of the run. The weights are restored afterwards, so
        an interrupted trial can be repeated.

        Args:
            config: static part of the updates of the warm start.
            rloo_config: static part of updates by RLOO, as in `measure_subset_gain`.
            should_stop: returns whether the run must stop; called before each batch.

        Returns:
            The mean gain after the trial. None if `should_stop` returned True.
        """
        run, first_config = self.run, self.config
        # An update reuses the memory of its state.
        state = jax.tree.map(jnp.copy, self.state)
        self._enter(config)
        key = jax.random.fold_in(jax.random.key(run.seed, impl=THREEFRY), 3)
        num_updates = max(1, round(TRIAL_SHARE * run.steps))
        for step_number in range(num_updates):
            if should_stop():
                return None
            if step_number % max(1, num_updates // 5) == 0:
                distributed.say(f"Trial of the warm start: {step_number}/{num_updates} updates")
            read_batch = functools.partial(self._batches.__getitem__, run.steps + step_number)
            local_batch = distributed.together(read_batch)
            batch = step.place_batch(config.forward.mesh, local_batch, run.batch_size)
            self.state, metrics = step.update(
                self._model.params,
                self.state,
                self.stats,
                batch,
                key=key,
                step=np.int32(step_number),
                config=config,
            )
            jax.block_until_ready(metrics)  # Limits the number of batches in device memory.
        gain = self.measure_subset_gain(rloo_config, should_stop)
        self.config, self.state = first_config, state
        return gain

    def use_phases(self, configs: Sequence[StepConfig]) -> None:
        """Replaces the phases of the run; must be called before the first update.

        Args:
            configs: static part of the updates of each phase.
        """
        self._configs = configs
        self._enter(configs[0])

    def restore(self, checkpoints: Checkpoints) -> None:
        """Restores the state of the latest checkpoint, and the position in the batches."""

        def make_template(num_done: int) -> dict[str, step.State | FeatureStats | Array]:
            """Returns arrays with the shapes of a checkpoint after `num_done` updates."""
            config = self._config_of(num_done)
            if config is not self.config:  # the state of another phase has another structure
                self._enter(config)
            return self._arrays

        self.done, arrays, description = checkpoints.restore(make_template)
        self.state, self.stats, self._key_data = (arrays[name] for name in self._arrays)
        distributed.say(f"Resuming after step {self.done}")
        self.stream = self._batches.stream(self.run.steps, description["batches"])

    def save(self, checkpoints: Checkpoints, description: JsonObject) -> None:
        """Saves a checkpoint for `restore`.

        Args:
            checkpoints: checkpoints of the run.
            description: description of the run, which is stored in the checkpoint.
        """
        description = description | {"selector": config_metadata(self.config.selector.config)}
        checkpoints.save(self.done, self._arrays, description | {"batches": self.stream.state})

    def _config_of(self, step_number: int) -> StepConfig:
        """Returns the static part of an update, counted from 1; 0 selects the first update."""
        begun_phases = [
            config for config in self._configs if config.phase.first < max(1, step_number)
        ]
        return begun_phases[-1]

    @property
    def _arrays(self) -> dict[str, step.State | FeatureStats | Array]:
        """The arrays of a checkpoint; the PRNG keys of all updates are derived from "key"."""
        return {"state": self.state, "stats": self.stats, "key": self._key_data}

    def update(self, batch: step.TrainingBatch) -> dict[str, Array]:
        """Performs the next update, and begins the next phase if the update belongs to it.

        Args:
            batch: the rows of the update that this process builds; on the host.

        Returns:
            The metrics of the update, possibly not computed yet.
        """
        config = self._config_of(self.done + 1)
        if config is not self.config:
            title = config.phase.objective.title
            distributed.say(f"Update {self.done + 1}: {title} from here on")
            self._enter(config)
        phase_start = config.phase.first
        key = jax.random.wrap_key_data(self._key_data, impl=THREEFRY)
        if phase_start:  # each phase counts updates from 0, so a later phase needs another key
            key = jax.random.fold_in(key, phase_start)
        batch = step.place_batch(config.forward.mesh, batch, self.run.batch_size)
        self.state, metrics = step.update(
            self._model.params,
            self.state,
            self.stats,
            batch,
            key=key,
            step=np.int32(self.done - phase_start),
            config=config,
        )
        self.done += 1
        return metrics

    def policy(self) -> Policy:
        """Returns the selector with its current weights and statistics."""
        stats, model = self.stats, self.config.backbone.config
        if model.num_deepstack_layers:  # a policy has only the statistics of the token features
            stats, _ = stats.split(model.feature_width)
        return self.config.selector.replace(params=self.state.params, stats=stats)

    def _gather_stats(self) -> None:
        """Computes `stats`, feature statistics over the first images of the training data.

        The last batch is padded with its first image, which counts 0 tokens as padding.
        """
        backbone, mesh = self.config.backbone, self.config.forward.mesh
        batch_size = self.run.batch_size
        images = self._batches.first_images(self.run.data.stats_images)

        def read_images() -> list[Pixels]:
            return list(itertools.islice(images, batch_size))

        while True:
            batch_images = distributed.together(read_images)
            # A process that skips unreadable images may have fewer images than another. All
            # processes must run the same programs, so the loop ends for all at once.
            if distributed.any_process(not batch_images):
                break
            num_images = len(batch_images)
            pixels = stack_images(batch_images + batch_images[:1] * (batch_size - num_images))
            num_tokens = backbone.num_tokens(backbone.grids(pixels))
            is_real = np.arange(batch_size) < num_images
            pixels, num_tokens = place_rows(mesh, (pixels, np.where(is_real, num_tokens, 0)))
            self.stats = step.gather_stats(
                self._model.params, self.stats, pixels, num_tokens, config=self.config
            )
