"""The objective of sampled sets: the language model answers from the kept tokens alone.

Several sets are drawn for each question, each is answered as it would be at inference, and sets
with better answers than their question's others become more probable. No gate, no denoiser and no
backward pass through the language model are involved.
"""

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from stepprune_jax.models.sequence import POSITIONS
from stepprune_jax.policy import Inputs, Limits, Progress, Pruned, gather, leave_one_out
from stepprune_jax.policy.budget import RANDOM_BUDGET, draw_budgets
from stepprune_jax.policy.host import implicit_promotion
from stepprune_jax.settings import Settings, choice, setting, share
from stepprune_jax.trained.base import Aux, Selector


@dataclasses.dataclass(frozen=True, kw_only=True)
class PolicyGradientSettings(Settings, path="config.policy_gradient"):
    """Training on sampled sets; the group `policy_gradient` of a configuration.

    Attributes:
        samples: sets drawn for each question; 0 for training through the noise gate.
        longest: largest set, as a share of an image's tokens.
        stops: share of the rows that end by the policy's stop, at a price of each token; the others
            have an exact count, log-uniform up to `longest`.
        positions: position ids of kept tokens in `train.py`, "original" or "compact".
    """

    samples: int = setting(0, "0, or an integer from 2", lambda value: value != 1 and value >= 0)
    longest: float = setting(0.11, "a share in (0, 1]", lambda value: 0 < value <= 1)
    stops: float = share(0.25)
    positions: str = choice("original", POSITIONS)


@implicit_promotion()
def policy_gradient_loss(
    method: Selector,
    settings: PolicyGradientSettings,
    key: Array,
    inputs: Inputs,
    answer_loss_fn: Callable[[Pruned], Float[Array, "b g"]],
    progress: Progress,
) -> tuple[Float[Array, ""], Aux]:
    """Computes minus the mean of advantage times log-probability.

    The reward of a set is the geometric mean probability of the answer's tokens, less the price of
    the set where it ends by the stop.

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
    """
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
    draw, cost = method.draw_sets(inputs, limits, keys, progress)

    def sets(picks):
        return gather(picks, inputs.whole, capacity)

    kept = jax.vmap(sets, out_axes=1)(draw.picks)
    loss = answer_loss_fn(kept).T
    reward = jnp.exp(-loss)
    # The cost of an exact count is that of the row's other draws, and changes no advantage.
    advantage = leave_one_out(reward - cost)
    value = -jnp.mean(jax.lax.stop_gradient(advantage) * draw.log_prob)
    count = draw.picks.count.astype(jnp.float32)
    counted = own | ~jnp.any(own)  # rows that end by the stop, where there are any
    scalars = {
        "lm_loss": jnp.mean(loss),
        "reward": jnp.mean(reward),
        "reward_std": jnp.mean(jnp.std(reward, axis=0)),
        "k_mean": jnp.mean(count, where=counted),
        "entropy": jnp.mean(draw.entropy),
    }
    return value, Aux(scalars, progress.state)
