"""A selector in training: what an interrupted run resumes from, and the updates that change it."""

import itertools

import jax
import numpy as np
from jaxtyping import Array

from stepprune_jax.checkpoints.load import VLM
from stepprune_jax.data.json_files import JsonObject
from stepprune_jax.models.images import stack_images
from stepprune_jax.parallel import distributed
from stepprune_jax.parallel.placement import place_rows, replicate_like
from stepprune_jax.policy import FeatureStats
from stepprune_jax.policy.host import THREEFRY, jax_defaults
from stepprune_jax.trained import Policy
from stepprune_jax.training import step
from stepprune_jax.training.batches import Batches
from stepprune_jax.training.settings import Run
from stepprune_jax.workdir.checkpoints import Checkpoints


class Trainer:
    """The state of a run, beside the frozen model.

    Attributes:
        done: updates done.
        state: weights, moments and counters.
        stats: statistics of the tower's features, deep ones behind those of the tokens.
        stream: the remaining batches; to be closed.
    """

    def __init__(self, run: Run, model: VLM, setup: step.Setup, batches: Batches):
        """Draws new weights; call `init` or `restore` next."""
        self._run, self._model, self._setup, self._batches = run, model, setup, batches
        seed = jax.random.key(run.seed, impl=THREEFRY)
        init_key, key = (jax.random.fold_in(seed, use) for use in range(2))
        with jax_defaults():
            state = jax.jit(step.init_state, static_argnums=1)(init_key, setup)
        stats = FeatureStats.start(setup.backbone.config.token_width)
        fresh = state, stats, jax.random.key_data(key)
        self.done = 0
        self.state, self.stats, self._key_data = replicate_like(model.params, fresh)

    def init(self, start: Policy | None = None) -> None:
        """Begins a run, with the weights and statistics of `start` if there is one."""
        deep = self._setup.backbone.config.deep_layers > 0
        if start is None or deep:
            self._gather_stats()
        if start is not None:
            begun = start.params, start.stats
            params, stats = replicate_like(self._model.params, begun)
            self.state = self.state._replace(params=params)
            self.stats = stats.continued(self.stats) if deep else stats
        self.stream = self._batches.stream(self._run.steps)

    def restore(self, checkpoints: Checkpoints) -> None:
        """Resumes the run from its latest checkpoint."""
        self.done, arrays, about = checkpoints.restore(self._arrays)
        self.state, self.stats, self._key_data = (arrays[name] for name in self._arrays)
        distributed.say(f"Resuming after step {self.done}")
        self.stream = self._batches.stream(self._run.steps, about["batches"])

    def save(self, checkpoints: Checkpoints, about: JsonObject) -> None:
        """Saves what `restore` reads, with a description of the run."""
        checkpoints.save(self.done, self._arrays, about | {"batches": self.stream.state})

    @property
    def _arrays(self) -> dict[str, step.State | FeatureStats | Array]:
        """The arrays of a checkpoint; the key is the one that those of all updates derive from."""
        return {"state": self.state, "stats": self.stats, "key": self._key_data}

    def update(self, batch: step.TrainingBatch) -> dict[str, Array]:
        """Performs the next update; returns its scalars."""
        batch = place_rows(self._setup.forward.mesh, batch, self._run.batch_size)
        self.state, scalars = step.update(
            self._model.params,
            self.state,
            self.stats,
            batch,
            jax.random.wrap_key_data(self._key_data, impl=THREEFRY),
            np.int32(self.done),
            setup=self._setup,
        )
        self.done += 1
        return scalars

    def policy(self) -> Policy:
        """Returns the policy as it is now."""
        stats, config = self.stats, self._setup.backbone.config
        if config.deep_layers:  # no policy reads what is behind a token
            stats, _ = stats.split(config.feature_width)
        return self._setup.method.replace(params=self.state.params, stats=stats)

    def _gather_stats(self) -> None:
        """Computes feature statistics over the images of the first steps."""
        backbone, mesh = self._setup.backbone, self._setup.forward.mesh
        size = self._run.batch_size
        images = self._batches.first_images(self._run.data.stats_images)
        while part := list(itertools.islice(images, size)):
            pixels = stack_images(part + part[:1] * (size - len(part)))
            tokens = backbone.num_tokens(backbone.grids(pixels))
            real = np.arange(size) < len(part)
            pixels, tokens = place_rows(mesh, (pixels, np.where(real, tokens, 0)))
            self.stats = step.gather_stats(
                self._model.params, self.stats, pixels, tokens, setup=self._setup
            )
