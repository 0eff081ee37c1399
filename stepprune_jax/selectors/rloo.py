"""The objective of sampled sets: the language model answers from the kept tokens alone.

Several sets are drawn for each question, each is answered as it would be at inference, and sets
with better answers than their question's others become more probable. No gate, no denoiser and no
backward pass through the language model are involved.
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
from stepprune_jax.settings import Settings, choice, setting, share

# Share of what all tokens gain that sets have to gain by themselves, so that sets alone teach a
# policy: between 8 % where they do and 4 % where they do not (the records of
# experiments/RESULTS.md). It has to be exceeded by a standard error: a run that begins with sets in
# vain learns nothing, and one that begins with the gate in vain little less.
LEAST_GAIN = 0.06


@dataclasses.dataclass(frozen=True, kw_only=True)
class RlooSettings(Settings, path="config.policy_gradient"):
    """Training on sampled sets; the group `policy_gradient` of a configuration.

    Attributes:
        samples: sets drawn for each question; 0 for training through the noise gate.
        longest: largest set, as a share of an image's tokens.
        stops: share of the rows that end by the policy's stop, at a price of each token; the others
            have an exact count, log-uniform up to `longest`. The price is the one of all tokens
            that the stop would keep, also beyond `longest`.
        positions: position ids of kept tokens in `train.py`, "original" or "compact".
    """

    samples: int = setting(0, "0, or an integer from 2", lambda value: value != 1 and value >= 0)
    longest: float = setting(0.11, "a share in (0, 1]", lambda value: 0 < value <= 1)
    stops: float = share(0.25)
    positions: str = choice("original", POSITIONS)


class SetRewards(NamedTuple):
    """Rewards of each question from a few tokens and from all, before the price of any token.

    Attributes:
        sets: mean reward of the sets drawn for it.
        luck: mean reward of the sets of another question's image, which luck and the question alone
            make right.
        all: reward of all tokens.
    """

    sets: Float[Array, "b"]
    luck: Float[Array, "b"]
    all: Float[Array, "b"]


class SubsetGain(NamedTuple):
    """Whether drawn sets teach a policy; `str` says so in words.

    The spread of rewards among the sets of a question is no measure of that: with few possible
    answers, lucky guesses spread them as much as tokens that matter do.

    Attributes:
        sets: mean reward of drawn sets.
        luck: that of another image's sets.
        all: that of all tokens.
        error: standard error of `sets` - `luck`.
        questions: how many questions these are means of.
    """

    sets: float
    luck: float
    all: float
    error: float
    questions: int

    @property
    def gain(self) -> float:
        """What sets gain over another image's, as a share of what all tokens gain."""
        room = self.all - self.luck
        return (self.sets - self.luck) / room if room > 0 else 0.0

    @property
    def suffices(self) -> bool:
        """Whether sets are worth drawing from the start."""
        return self.gain - self._doubt >= LEAST_GAIN

    @property
    def _doubt(self) -> float:
        """The standard error of the gain, of which what all tokens gain has next to none."""
        room = self.all - self.luck
        return self.error / room if room > 0 else 0.0

    def __str__(self) -> str:
        clear = "clearly" if self.suffices else "not clearly"
        return (
            f"a few tokens gain {100 * self.gain:.1f} +- {100 * self._doubt:.1f} % of what all "
            f"tokens gain, {clear} more than the {100 * LEAST_GAIN:.0f} % from which sets alone "
            f"teach a policy (mean probability of an answer: {self.sets:.3f} with a few, "
            f"{self.luck:.3f} with those of another image, {self.all:.3f} with all; "
            f"{self.questions} questions)"
        )


def subset_gain(rewards: Iterable[SetRewards]) -> SubsetGain:
    """Averages the rewards of batches of questions, on the host."""
    sets, luck, every = (
        np.concatenate([np.asarray(x) for x in part]) for part in zip(*rewards, strict=True)
    )
    means = float(sets.mean()), float(luck.mean()), float(every.mean())
    error = float((sets - luck).std()) / len(sets) ** 0.5
    return SubsetGain(*means, error, len(sets))


@implicit_promotion()
def rloo_loss(
    method: Selector,
    settings: RlooSettings,
    key: Array,
    inputs: Inputs,
    answer_loss_fn: Callable[[Pruned], Float[Array, "b g"]],
    progress: Progress,
) -> tuple[Float[Array, ""], Aux]:
    """Computes minus the mean of advantage times log-probability, and the price of the stop.

    The reward of a set is the geometric mean probability of the answer's tokens. What the stop
    keeps has its expected price, from an episode without an end: beyond the largest set there are
    no rewards, and without a price nothing would teach the stop there.

    Args:
        method: the method that is trained; differentiate with respect to its weights alone.
        settings: of the objective.
        key: PRNG key; consumed.
        inputs: image and question, never the answer.
        answer_loss_fn: maps the sets of each row, [b, g, ...], to the mean loss of the answer's
            tokens, [b, g].
        progress: schedules of the training so far.

    Returns:
        As `Selector.loss`.

    Raises:
        ValueError: losses of another shape than [b, g].
    """
    draw_key, stop_key = jax.random.split(key)
    draw, kept = _draw(method, settings, draw_key, inputs, progress)
    loss = _answer_losses(answer_loss_fn, kept).T
    reward = jnp.exp(-loss)
    advantage = jax.lax.stop_gradient(leave_one_out(reward))
    value = -jnp.mean(advantage * draw.log_prob)
    scalars = {
        "lm_loss": jnp.mean(loss),
        "reward": jnp.mean(reward),
        "reward_std": jnp.mean(jnp.std(reward, axis=0)),
        "entropy": jnp.mean(draw.entropy),
    }
    if method.has_stop and settings.stops:
        stop = method.price_stop(inputs, stop_key, progress)
        value = value + settings.stops * jnp.mean(stop.price)
        scalars |= stop_metrics(stop.count, stop.shortest, stop.longest)
    else:
        scalars["k_mean"] = jnp.mean(draw.picks.count.astype(jnp.float32))
    return value, Aux(scalars, progress.state)


@implicit_promotion()
def subset_rewards(
    method: Selector,
    settings: RlooSettings,
    key: Array,
    inputs: Inputs,
    answer_loss_fn: Callable[[Pruned], Float[Array, "b g"]],
) -> SetRewards:
    """Computes what the sets of a policy as it is are worth, all of exact counts.

    With drawn weights the sets are random ones. Arguments are those of `rloo_loss`, but
    `answer_loss_fn` is also called with one set of all tokens, [b, 1, n].
    """
    counted = dataclasses.replace(settings, stops=0.0)
    _, kept = _draw_at_once(method, counted, key, inputs, Progress())
    n, size = inputs.image.shape[1], jnp.sum(inputs.real, axis=1)
    every = jnp.argsort(~inputs.real, axis=1, stable=True)  # padding last
    whole = gather(first_picks(every, size, n), inputs.whole, n)
    luck = jax.tree.map(lambda x: jnp.roll(x, 1, axis=0), kept)

    def reward(kept):
        return jnp.mean(jnp.exp(-_answer_losses(answer_loss_fn, kept)), axis=1)

    return SetRewards(reward(kept), reward(luck), reward(jax.tree.map(lambda x: x[:, None], whole)))


def _answer_losses(
    answer_loss_fn: Callable[[Pruned], Float[Array, "b g"]], kept: Pruned
) -> Float[Array, "b g"]:
    """Returns the losses of all sets, [b, g].

    With as many sets as rows, losses [g, b] have the right shape. The shape of the losses of one
    set tells them apart, unless the function cannot be traced.
    """
    b, g = kept.count.shape
    if b == g > 1:
        one = jax.tree.map(lambda x: x[:, :1], kept)
        with contextlib.suppress(jax.errors.JAXTypeError):  # a program that reads values
            _require_sets(jax.eval_shape(answer_loss_fn, one), b, 1)
    losses = answer_loss_fn(kept)
    _require_sets(losses, b, g)
    return jnp.asarray(losses)


def _require_sets(losses: Any, b: int, g: int) -> None:
    expected = f"({b}, {g}), a loss for each of the {g} sets of each of the {b} rows"
    require_losses("answer_loss_fn", losses, (b, g), expected)


def _draw(
    method: Selector,
    settings: RlooSettings,
    key: Array,
    inputs: Inputs,
    progress: Progress,
) -> tuple[SampledSubsets, Pruned]:
    """Draws sets, and gathers their tokens, [b, g, ...]."""
    draw_key, budget_key, own_key = jax.random.split(key, 3)
    (b, n), g = inputs.image.shape[:2], settings.samples
    size = jnp.sum(inputs.real, axis=1)
    capacity = max(1, int(settings.longest * n))
    longest = jnp.clip((settings.longest * size).astype(jnp.int32), 1, capacity)
    shares = min(RANDOM_BUDGET[0], settings.longest), settings.longest
    exact = draw_budgets(budget_key, size, longest, shares)
    own = jax.random.uniform(own_key, (b,), jnp.float32) < (
        settings.stops if method.has_stop else 0.0
    )
    limits = Limits(
        min_tokens=jnp.where(own, jnp.minimum(method.min_tokens, longest), exact),
        max_tokens=jnp.where(own, longest, exact),
        max_steps=capacity,
    )
    keys = jax.random.split(draw_key, g)
    draw = method.sample_subsets(inputs, limits, keys, progress)

    def sets(picks):
        return gather(picks, inputs.whole, capacity)

    return draw, jax.vmap(sets, out_axes=1)(draw.picks)


# One program, where the caller has none around it.
_draw_at_once = jax.jit(_draw, static_argnums=1)
