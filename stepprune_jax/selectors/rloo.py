"""RLOO (REINFORCE leave-one-out) on sampled subsets of tokens.

Several subsets are sampled per question. The language model answers from each subset as it would
at inference. Subsets with better answers than the question's other subsets become more probable.
The objective uses no noise gate, no denoiser and no backward pass through the language model.
"""

import contextlib
import dataclasses
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from stepprune_jax.models.sequence import POSITIONS
from stepprune_jax.policy import (
    Inputs,
    Limits,
    Progress,
    Pruned,
    SampledSubsets,
    gather,
    leave_one_out,
)
from stepprune_jax.policy.budget import RANDOM_BUDGET, draw_budgets
from stepprune_jax.policy.jax_settings import implicit_promotion
from stepprune_jax.policy.objective import require_losses, stop_metrics
from stepprune_jax.policy.selection import first_picks
from stepprune_jax.selectors.base import Aux, Selector
from stepprune_jax.settings import Settings, choice, count, setting, share

# Minimum gain of random subsets, as a fraction of the gain of all tokens, for starting with RLOO.
# RLOO learned at a gain of 8 % and did not learn at 4 % (experiments/RESULTS.md). The gain has to
# exceed the minimum by one standard error: if subsets cannot learn, the run fails, while starting
# with the gate costs little.
MIN_GAIN = 0.06


@dataclasses.dataclass(frozen=True, kw_only=True)
class RlooSettings(Settings, path="config.rloo"):
    """Settings of RLOO; `training.RlooTraining` adds learning rates and a price for a run.

    Attributes:
        samples: g, the number of subsets per question.
        longest: size of the largest subset, as a fraction of an image's tokens.
        stops: fraction of the rows that end by the policy's learned stop. All other rows have an
            exact count, log-uniform up to `longest`. The stop pays the price of all tokens that it
            would keep, also beyond `longest`.
        positions: position ids of kept tokens in `train.py`, "original" or "compact".
    """

    samples: int = count(8, minimum=2)
    longest: float = setting(0.11, "a share in (0, 1]", lambda value: 0 < value <= 1)
    stops: float = share(0.25)
    positions: str = choice("original", POSITIONS)


class SubsetRewards(NamedTuple):
    """Reward of each question with subsets and with all tokens, without the price of tokens.

    Attributes:
        subsets: [b] mean reward of the question's subsets.
        chance: [b] mean reward of the subsets of another question's image: the reward of guessing
            from the question without its image.
        full: [b] reward of all tokens.
    """

    subsets: Float[Array, "b"]
    chance: Float[Array, "b"]
    full: Float[Array, "b"]


class SubsetGain(NamedTuple):
    """Gain of random subsets, which decides whether RLOO can start; `str` explains it.

    The standard deviation of the rewards of a question's subsets would be no criterion: with few
    possible answers, lucky guesses spread the rewards as much as informative tokens do. A run's
    folder stores the fields by their names.

    Attributes:
        sets: mean reward of sampled subsets.
        luck: mean reward of the subsets of another question's image, right by chance.
        all: mean reward of all tokens.
        error: standard error of `sets` - `luck`.
        questions: number of questions.
    """

    sets: float
    luck: float
    all: float
    error: float
    questions: int

    @property
    def gain(self) -> float:
        """The gain of subsets over chance, as a fraction of the gain of all tokens."""
        full_gain = self.all - self.luck
        return (self.sets - self.luck) / full_gain if full_gain > 0 else 0.0

    @property
    def suffices(self) -> bool:
        """Whether training can start with RLOO."""
        return self.gain - self._gain_error >= MIN_GAIN

    @property
    def _gain_error(self) -> float:
        """The standard error of `gain`; the error of the gain of all tokens is neglected."""
        full_gain = self.all - self.luck
        return self.error / full_gain if full_gain > 0 else 0.0

    def __str__(self) -> str:
        clarity = "clearly" if self.suffices else "not clearly"
        return (
            f"a few tokens gain {100 * self.gain:.1f} +- {100 * self._gain_error:.1f} % of what "
            f"all tokens gain, {clarity} more than the {100 * MIN_GAIN:.0f} % from which sampled "
            f"subsets teach a policy (mean probability of an answer: {self.sets:.3f} with a "
            f"few, {self.luck:.3f} with a few of another image, {self.all:.3f} with all; "
            f"{self.questions} questions)"
        )


def subset_gain(rewards: Iterable[SubsetRewards]) -> SubsetGain:
    """Averages the rewards of batches of questions, on the host."""
    subsets, chance, full = (
        np.concatenate([np.asarray(x) for x in field]) for field in zip(*rewards, strict=True)
    )
    return SubsetGain(
        sets=float(subsets.mean()),
        luck=float(chance.mean()),
        all=float(full.mean()),
        error=float((subsets - chance).std()) / len(subsets) ** 0.5,
        questions=len(subsets),
    )


@implicit_promotion()
def rloo_loss(
    method: Selector,
    settings: RlooSettings,
    key: Array,
    inputs: Inputs,
    answer_loss_fn: Callable[[Pruned], Float[Array, "b g"]],
    *,
    progress: Progress = Progress(),
) -> tuple[Float[Array, ""], Aux]:
    """Computes -mean(advantage x log-probability), plus the price of the learned stop.

    The reward of a subset is the geometric mean probability of the answer's tokens. The price of
    the stop is the expected price of an episode that runs to T_max. Subsets beyond the largest
    size have no rewards, so only the price teaches the stop there.

    Args:
        method: the method to train; differentiate with respect to its weights only.
        settings: settings of RLOO.
        key: PRNG key; consumed.
        inputs: image and question, never the answer.
        answer_loss_fn: maps the subsets of each row, with leaves [b, g, ...], to the mean loss of
            the answer's tokens, [b, g].
        progress: progress of training.

    Returns:
        The loss, its metrics and the next state.

    Raises:
        ValueError: losses of another shape than [b, g].
    """
    sample_key, stop_key = jax.random.split(key)
    subsets, kept = _sample_and_gather(method, settings, sample_key, inputs, progress)
    answer_loss = _answer_losses(answer_loss_fn, kept).T
    reward = jnp.exp(-answer_loss)
    advantage = jax.lax.stop_gradient(leave_one_out(reward))
    loss = -jnp.mean(advantage * subsets.log_prob)
    metrics = {
        "lm_loss": jnp.mean(answer_loss),
        "reward": jnp.mean(reward),
        "reward_std": jnp.mean(jnp.std(reward, axis=0)),
        "entropy": jnp.mean(subsets.entropy),
    }
    if method.has_stop and settings.stops:
        stop = method.price_stop(_every_nth_row(inputs, settings.stops), stop_key, progress)
        loss = loss + settings.stops * jnp.mean(stop.price)
        metrics |= stop_metrics(stop.count, stop.shortest, stop.longest)
    else:
        metrics["k_mean"] = jnp.mean(subsets.picks.count.astype(jnp.float32))
    return loss, Aux(metrics, progress.state)


def _every_nth_row(inputs: Inputs, share: float) -> Inputs:
    """Returns a share of the rows, evenly spaced so that all devices have some.

    An episode to T_max has far more steps than a subset. A share of the rows bounds its cost.
    """
    step = max(1, round(1 / share))
    rows = (None if x is None else x[::step] for x in inputs[:4])
    return Inputs(*rows, inputs.stats)


@implicit_promotion()
def subset_rewards(
    method: Selector,
    settings: RlooSettings,
    key: Array,
    inputs: Inputs,
    answer_loss_fn: Callable[[Pruned], Float[Array, "b g"]],
) -> SubsetRewards:
    """Computes the rewards of a policy's subsets, which all have exact counts.

    A policy with randomly initialized weights samples random subsets. The arguments are those of
    `rloo_loss`. `answer_loss_fn` is also called with one subset of all tokens, [b, 1, n].
    """
    exact_settings = dataclasses.replace(settings, stops=0.0)
    _, kept = _jit_sample_and_gather(method, exact_settings, key, inputs, Progress())
    n, num_tokens = inputs.image.shape[1], jnp.sum(inputs.real, axis=1)
    real_first = jnp.argsort(~inputs.real, axis=1, stable=True)
    all_kept = gather(first_picks(real_first, num_tokens, n), inputs.with_deepstack, n)
    all_kept = jax.tree.map(lambda x: x[:, None], all_kept)
    mismatched = jax.tree.map(lambda x: jnp.roll(x, 1, axis=0), kept)

    def mean_reward(kept):
        return jnp.mean(jnp.exp(-_answer_losses(answer_loss_fn, kept)), axis=1)

    return SubsetRewards(mean_reward(kept), mean_reward(mismatched), mean_reward(all_kept))


def _answer_losses(
    answer_loss_fn: Callable[[Pruned], Float[Array, "b g"]], kept: Pruned
) -> Float[Array, "b g"]:
    """Returns the checked losses of all subsets, [b, g].

    If b = g, losses [g, b] would pass the check of the shape. Their shape for a single subset
    reveals the mistake, unless the function cannot be traced.
    """
    b, g = kept.count.shape
    if b == g > 1:
        single = jax.tree.map(lambda x: x[:, :1], kept)
        with contextlib.suppress(jax.errors.JAXTypeError):  # the function reads concrete values
            _require_subset_losses(jax.eval_shape(answer_loss_fn, single), b, 1)
    losses = answer_loss_fn(kept)
    _require_subset_losses(losses, b, g)
    return jnp.asarray(losses)


def _require_subset_losses(losses: Any, b: int, g: int) -> None:
    """Raises a ValueError unless the losses have shape [b, g]."""
    expected = f"({b}, {g}), a loss for each of the {g} subsets of each of the {b} rows"
    require_losses("answer_loss_fn", losses, (b, g), expected)


def _sample_and_gather(
    method: Selector,
    settings: RlooSettings,
    key: Array,
    inputs: Inputs,
    progress: Progress,
) -> tuple[SampledSubsets, Pruned]:
    """Samples subsets and gathers their tokens.

    Returns:
        The subsets, with a leading axis g, and their tokens, with leaves [b, g, ...].
    """
    subset_key, budget_key, stop_key = jax.random.split(key, 3)
    (b, n), g = inputs.image.shape[:2], settings.samples
    num_tokens = jnp.sum(inputs.real, axis=1)
    capacity = max(1, int(settings.longest * n))
    max_count = jnp.clip((settings.longest * num_tokens).astype(jnp.int32), 1, capacity)
    shares = min(RANDOM_BUDGET[0], settings.longest), settings.longest
    budget = draw_budgets(budget_key, num_tokens, max_count, shares)
    stop_share = settings.stops if method.has_stop else 0.0
    uses_stop = jax.random.uniform(stop_key, (b,), jnp.float32) < stop_share
    limits = Limits(
        min_tokens=jnp.where(uses_stop, jnp.minimum(method.min_tokens, max_count), budget),
        max_tokens=jnp.where(uses_stop, max_count, budget),
        max_steps=capacity,
    )
    subsets = method.sample_subsets(inputs, limits, jax.random.split(subset_key, g), progress)

    def gather_subset(picks):
        return gather(picks, inputs.with_deepstack, capacity)

    return subsets, jax.vmap(gather_subset, out_axes=1)(subsets.picks)


# A single program, for callers outside of jit.
_jit_sample_and_gather = jax.jit(_sample_and_gather, static_argnums=1)
