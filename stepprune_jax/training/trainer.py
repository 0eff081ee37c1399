"""The state of a training run, and the updates that change it."""

import dataclasses
import functools
import itertools
from collections.abc import Callable, Sequence

import jax
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
from stepprune_jax.training.recipes import Phase
from stepprune_jax.training.settings import Run
from stepprune_jax.training.step_config import StepConfig
from stepprune_jax.workdir.checkpoints import Checkpoints

# Number of training questions on which subsets are tried: enough for a standard error of the gain
# well below `selectors.rloo.MIN_GAIN`.
_NUM_TRIED_QUESTIONS = 512


class Trainer:
    """The state of a run without the frozen model.

    Attributes:
        run: settings of the run.
        done: number of updates done.
        config: static part of the last update, or of the first before any update.
        state: weights, optimizer state and counters.
        stats: statistics of the tower's features: token features, then deep features.
        stream: the batches of the updates to come. The caller must close it.
    """

    def __init__(self, run: Run, model: VLM, configs: Sequence[StepConfig], batches: Batches):
        """Creates random weights. Call `init` or `restore` next.

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
        """Returns the first state of a run whose updates have the current static part."""
        with jax_defaults():
            state = jax.jit(step.init_state, static_argnums=1)(self._init_key, self.config)
        return replicate_like(self._model.params, state)

    def _enter(self, config: StepConfig) -> None:
        """Begins a phase with the current weights, and a new state of optimizer and objective."""
        self.config = config
        new = self._make_state()
        self.state = self.state._replace(optimizer=new.optimizer, method=new.method)

    def init(self, start: tuple[Weights, FeatureStats] | None = None) -> None:
        """Begins a run, with the weights and statistics of `start` if they are given."""
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
        """Measures what sampled subsets gain on the first training questions.

        Args:
            config: static part of updates by RLOO.
            should_stop: whether a signal has asked the run to stop.

        Returns:
            The gain on at most one epoch, so that each question counts once. None if `should_stop`
            returned True.
        """
        # One program serves runs of any length: the measurement does not depend on the steps.
        config = dataclasses.replace(
            config, phase=dataclasses.replace(config.phase, first=0, last=1)
        )
        key = jax.random.fold_in(jax.random.key(self.run.seed, impl=THREEFRY), 2)
        batch_size, epoch_size = self.run.batch_size, len(self._batches)
        num_batches = -(-min(_NUM_TRIED_QUESTIONS, epoch_size) // batch_size)
        rewards = []
        for number in range(min(num_batches, self.run.steps)):
            if should_stop():
                return None
            read = functools.partial(self._batches.__getitem__, number)
            batch = place_rows(config.forward.mesh, distributed.together(read), batch_size)
            batch_rewards = step.measure_subset_gain(
                self._model.params,
                self.state.params,
                self.stats,
                batch,
                jax.random.fold_in(key, number),
                config=config,
            )
            # The last batch may begin another epoch. The rewards are fetched at once, because
            # batches in flight take memory.
            num_unseen = epoch_size - number * batch_size
            batch_rewards = jax.device_get(batch_rewards)
            rewards.append(SubsetRewards(*(x[:num_unseen] for x in batch_rewards)))
        return subset_gain(rewards)

    def use_phases(self, configs: Sequence[StepConfig]) -> None:
        """Replaces the phases before the first update."""
        self._configs = configs
        self._enter(configs[0])

    def restore(self, checkpoints: Checkpoints) -> None:
        """Resumes the run from its latest checkpoint."""

        def make_template(done: int) -> dict[str, step.State | FeatureStats | Array]:
            config = self._config_of(done)
            if config is not self.config:
                self._enter(config)
            return self._arrays

        self.done, arrays, about = checkpoints.restore(make_template)
        self.state, self.stats, self._key_data = (arrays[name] for name in self._arrays)
        distributed.say(f"Resuming after step {self.done}")
        self.stream = self._batches.stream(self.run.steps, about["batches"])

    def save(self, checkpoints: Checkpoints, about: JsonObject) -> None:
        """Saves the state that `restore` reads, with a description of the run and of the policy."""
        about = about | {"selector": config_metadata(self.config.selector.config)}
        checkpoints.save(self.done, self._arrays, about | {"batches": self.stream.state})

    def _config_of(self, number: int) -> StepConfig:
        """Returns the static part of update `number`, counted from 1. Update 0 has the first."""
        started = [config for config in self._configs if config.phase.first < max(1, number)]
        return started[-1]

    @property
    def _arrays(self) -> dict[str, step.State | FeatureStats | Array]:
        """The arrays of a checkpoint. The keys of all updates derive from "key"."""
        return {"state": self.state, "stats": self.stats, "key": self._key_data}

    def update(self, batch: step.TrainingBatch) -> dict[str, Array]:
        """Performs the next update; returns its metrics."""
        config = self._config_of(self.done + 1)
        if config is not self.config:
            title = config.phase.objective.title
            distributed.say(f"Update {self.done + 1}: {title} from here on")
            self._enter(config)
        first = config.phase.first
        key = jax.random.wrap_key_data(self._key_data, impl=THREEFRY)
        if first:  # the number of the update restarts at 0, so the phase needs another key
            key = jax.random.fold_in(key, first)
        batch = place_rows(config.forward.mesh, batch, self.run.batch_size)
        self.state, metrics = step.update(
            self._model.params,
            self.state,
            self.stats,
            batch,
            key=key,
            step=np.int32(self.done - first),
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
        """Computes feature statistics over the first images of the training data."""
        backbone, mesh = self.config.backbone, self.config.forward.mesh
        batch_size = self.run.batch_size
        images = self._batches.first_images(self.run.data.stats_images)

        def read_images() -> list[Pixels]:
            return list(itertools.islice(images, batch_size))

        # The loop ends when one process has no more images: it may be the only process that cannot
        # read an image.
        while not distributed.any_process(not (part := distributed.together(read_images))):
            pixels = stack_images(part + part[:1] * (batch_size - len(part)))
            num_tokens = backbone.num_tokens(backbone.grids(pixels))
            is_real = np.arange(batch_size) < len(part)
            pixels, num_tokens = place_rows(mesh, (pixels, np.where(is_real, num_tokens, 0)))
            self.stats = step.gather_stats(
                self._model.params, self.stats, pixels, num_tokens, config=self.config
            )
