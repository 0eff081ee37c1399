"""The order in which a trained policy takes the tokens of each question's picture.

Which token comes next does not depend on the stop, so one rollout per question serves every
budget, and every stop bias: all selections are prefixes of one order.
"""

import functools
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from stepprune_jax import policy as steps_of
from stepprune_jax.checkpoints.load import VLM
from stepprune_jax.checkpoints.policy import Policy
from stepprune_jax.evaluation.split import Encoded
from stepprune_jax.evaluation.timing import timed
from stepprune_jax.inference.prefix import pair_up
from stepprune_jax.parallel.placement import beside, fetch, mesh_of, place_rows
from stepprune_jax.policy import FeatureStats, PolicyConfig
from stepprune_jax.pruning import autoselect
from stepprune_jax.pruning.autoselect import AutoSelectConfig


class Ordering(NamedTuple):
    """The order of one method.

    Attributes:
        order: [q, t] token indices in order of choice.
        margin: [q, t] stop margins before each step, see `policy.count_at_bias`; None for a method
            without a stop.
        seconds: of a question, on average, for all the steps.
    """

    order: Int[np.ndarray, "q t"]
    margin: Float[np.ndarray, "q t"] | None
    seconds: float = 0.0


@functools.partial(jax.jit, static_argnames=("config", "steps"))
def roll_out(
    params: Any,
    config: PolicyConfig | AutoSelectConfig,
    image: Float[Array, "b n d"],
    text: Float[Array, "b l e"] | None,
    text_mask: Bool[Array, "b l"] | None,
    stats: FeatureStats | None,
    steps: int,
) -> tuple[Int[Array, "b t"], Float[Array, "b t"] | None]:
    """The first `steps` choices, going on after the stop, and the stop margins if there is one.

    Args:
        params: the selector's weights.
        config: its configuration.
        image: features.
        text: embeddings of the user's words.
        text_mask: True at real ones.
        stats: of the features.
        steps: length of the order.
    """
    if isinstance(config, AutoSelectConfig):
        scores = autoselect.scores(params, config, image, text, text_mask=text_mask, stats=stats)
        return autoselect.order(scores)[:, :steps], None
    x = steps_of.standardise(image, stats)
    slots = steps_of.memory(params, steps_of.encode(params, config, x, text, text_mask=text_mask))
    # As in inference: the chosen slot itself is fed back.
    found = steps_of.select(
        params, config, slots, max_steps=steps, feedback_fn=steps_of.hard_feedback
    )
    return found.choice, found.margin


def trained_order(
    model: VLM,
    policy: Policy,
    split: Encoded,
    *,
    steps: int,
    batch_size: int,
    report: Callable[[int], None] = lambda done: None,
) -> Ordering:
    """Rolls a policy out on every question.

    Args:
        model: the model.
        policy: StepPrune's or AutoSelect's.
        split: the questions.
        steps: length of the order.
        batch_size: questions at a time.
        report: called with the number of questions done at each batch.

    Returns:
        The order, and for StepPrune the stop margins.
    """
    mesh = mesh_of(model.params)
    params, stats = beside(model.params, (policy.params, policy.stats))
    orders, margins, seconds = [], [], 0.0
    for rows, count in batches(len(split.image_of), batch_size):
        features, ids, length = place_rows(
            mesh, (split.features[split.image_of[rows]], split.words[rows], split.num_words[rows])
        )

        def run(features=features, ids=ids, length=length):
            image = np.arange(batch_size, dtype=np.int32)
            seen, *text = pair_up(
                model.params, model.config, features, image, ids, length, mesh=mesh
            )
            text = text if policy.config.text_width else (None, None)
            arguments = (params, policy.config, seen, *text, stats, steps)
            return fetch(roll_out(*arguments))

        (order, margin), taken = timed(run, pair_up.num_compiled, roll_out._cache_size)
        seconds += taken
        orders.append(order[:count])
        if margin is not None:
            margins.append(margin[:count])
        report(int(rows[0]) + count)
    return Ordering(
        np.concatenate(orders), np.concatenate(margins) if margins else None,
        seconds / len(split.image_of),
    )  # fmt: skip


def batches(total: int, size: int) -> Iterator[tuple[np.ndarray, int]]:
    """Row numbers of each batch, the last one filled up, and how many are real.

    Args:
        total: rows.
        size: of every batch.
    """
    for first in range(0, total, size):
        rows = np.arange(first, first + size)
        yield np.minimum(rows, total - 1), min(size, total - first)
