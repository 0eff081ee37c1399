"""A selector in training: what an interrupted run resumes from, and the updates that change it."""

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
from stepprune_jax.parallel.placement import mesh_of, place_rows, replicate_like
from stepprune_jax.policy import FeatureStats
from stepprune_jax.policy.jax_settings import THREEFRY, jax_defaults
from stepprune_jax.selectors import Policy, SubsetGain
from stepprune_jax.selectors.rloo import SubsetRewards, subset_gain
from stepprune_jax.training import step
from stepprune_jax.training.batches import Batches
from stepprune_jax.training.settings import Phase, Run, make_step_config
from stepprune_jax.workdir.checkpoints import Checkpoints

# Training questions on which sets are tried.
_QUESTIONS = 512


class Trainer:
    """The state of a run, beside the frozen model.

    Attributes:
        done: updates done.
        phase: the phase of the last update, or of the first.
        state: weights, moments and counters.
        stats: statistics of the tower's features, deep ones behind those of the tokens.
        stream: the remaining batches; to be closed.
    """

    def __init__(self, run: Run, model: VLM, phases: Sequence[Phase], batches: Batches):
        """Draws new weights; call `init` or `restore` next."""
        self._run, self._model, self._batches = run, model, batches
        seed = jax.random.key(run.seed, impl=THREEFRY)
        self._init_key, key = (jax.random.fold_in(seed, use) for use in range(2))
        self.done, self._phases = 0, phases
        self._enter(phases[0])
        self.state = self._fresh_state()
        stats = FeatureStats.start(model.config.token_width)
        fresh = stats, jax.random.key_data(key)
        self.stats, self._key_data = replicate_like(model.params, fresh)

    def _enter(self, phase: Phase) -> None:
        """Takes the settings of a phase; the state remains."""
        mesh = mesh_of(self._model.params)
        self.phase, self._setup = phase, make_step_config(phase.run, self._model.backbone, mesh)

    def _fresh_state(self) -> step.State:
        """Draws the state in which a run of the phase would begin."""
        with jax_defaults():
            state = jax.jit(step.init_state, static_argnums=1)(self._init_key, self._setup)
        return replicate_like(self._model.params, state)

    def _renew(self, phase: Phase) -> None:
        """Enters a phase with the weights as they are, and moments of its own."""
        self._enter(phase)
        fresh, kept = self._fresh_state(), ("optimizer", "method")
        self.state = self.state._replace(**{name: getattr(fresh, name) for name in kept})

    def init(self, start: Policy | None = None) -> None:
        """Begins a run, with the weights and statistics of `start` if there is one."""
        deep = self._setup.backbone.config.num_deepstack_layers > 0
        if start is None or deep:
            self._gather_stats()
        if start is not None:
            begun = start.params, start.stats
            params, stats = replicate_like(self._model.params, begun)
            self.state = self.state._replace(params=params)
            self.stats = stats.continued(self.stats) if deep else stats
        self.stream = self._batches.stream(self._run.steps)

    def measure_subset_gain(self, phase: Phase, stop: Callable[[], bool]) -> SubsetGain | None:
        """Tries the sets of a phase on the first training questions, each once.

        Returns:
            The rewards of at most one epoch; None if asked to stop.
        """
        setup, rewards = (
            make_step_config(phase.run, self._model.backbone, self._setup.forward.mesh),
            [],
        )
        setup = dataclasses.replace(setup, steps=1)  # one program for runs of any length
        key = jax.random.fold_in(jax.random.key(self._run.seed, impl=THREEFRY), 2)
        size, epoch = self._run.batch_size, len(self._batches)
        for number in range(min(-(-min(_QUESTIONS, epoch) // size), self._run.steps)):
            if stop():
                return None
            read = functools.partial(self._batches.__getitem__, number)
            batch = place_rows(setup.forward.mesh, distributed.together(read), size)
            arguments = self.state.params, self.stats, batch, jax.random.fold_in(key, number)
            tried = step.measure_subset_gain(self._model.params, *arguments, setup=setup)
            # At once, as batches that wait take memory. The last batch may begin another epoch.
            unseen = epoch - number * size
            rewards.append(SubsetRewards(*(x[:unseen] for x in jax.device_get(tried))))
        return subset_gain(rewards)

    def follow(self, phases: Sequence[Phase]) -> None:
        """Changes the phases before the first update."""
        self._phases = phases
        self._renew(phases[0])

    def restore(self, checkpoints: Checkpoints) -> None:
        """Resumes the run from its latest checkpoint."""

        def like(done):
            if (phase := self._phase_of(done)) is not self.phase:
                self._renew(phase)
            return self._arrays

        self.done, arrays, about = checkpoints.restore(like)
        self.state, self.stats, self._key_data = (arrays[name] for name in self._arrays)
        distributed.say(f"Resuming after step {self.done}")
        self.stream = self._batches.stream(self._run.steps, about["batches"])

    def save(self, checkpoints: Checkpoints, about: JsonObject) -> None:
        """Saves what `restore` reads, with a description of the run and of the policy."""
        about = about | {"selector": config_metadata(self._setup.method.config)}
        checkpoints.save(self.done, self._arrays, about | {"batches": self.stream.state})

    def _phase_of(self, number: int) -> Phase:
        """Returns the phase of an update, counted from 1."""
        return [phase for phase in self._phases if phase.first < max(1, number)][-1]

    @property
    def _arrays(self) -> dict[str, step.State | FeatureStats | Array]:
        """The arrays of a checkpoint; the key is the one that those of all updates derive from."""
        return {"state": self.state, "stats": self.stats, "key": self._key_data}

    def update(self, batch: step.TrainingBatch) -> dict[str, Array]:
        """Performs the next update; returns its scalars."""
        phase = self._phase_of(self.done + 1)
        if phase is not self.phase:
            distributed.say(f"Update {self.done + 1}: {phase} from here on")
            self._renew(phase)
        key = jax.random.wrap_key_data(self._key_data, impl=THREEFRY)
        if phase.first:  # its updates are counted anew, and share no draw with earlier ones
            key = jax.random.fold_in(key, phase.first)
        batch = place_rows(self._setup.forward.mesh, batch, self._run.batch_size)
        self.state, scalars = step.update(
            self._model.params,
            self.state,
            self.stats,
            batch,
            key,
            np.int32(self.done - phase.first),
            setup=self._setup,
        )
        self.done += 1
        return scalars

    def policy(self) -> Policy:
        """Returns the policy as it is now."""
        stats, config = self.stats, self._setup.backbone.config
        if config.num_deepstack_layers:  # no policy reads what is behind a token
            stats, _ = stats.split(config.feature_width)
        return self._setup.method.replace(params=self.state.params, stats=stats)

    def _gather_stats(self) -> None:
        """Computes feature statistics over the images of the first steps."""
        backbone, mesh = self._setup.backbone, self._setup.forward.mesh
        size = self._run.batch_size
        images = self._batches.first_images(self._run.data.stats_images)

        def read() -> list[Pixels]:
            return list(itertools.islice(images, size))

        # Until one process has no more: it may be the only one that cannot read an image.
        while not distributed.any_process(not (part := distributed.together(read))):
            pixels = stack_images(part + part[:1] * (size - len(part)))
            tokens = backbone.num_tokens(backbone.grids(pixels))
            real = np.arange(size) < len(part)
            pixels, tokens = place_rows(mesh, (pixels, np.where(real, tokens, 0)))
            self.stats = step.gather_stats(
                self._model.params, self.stats, pixels, tokens, setup=self._setup
            )
