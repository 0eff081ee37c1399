"""Gathers the selected tokens into a short prefix that is padded to a static size."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.typing import ArrayLike
from jaxtyping import Array, Float

from stepprune_jax.policy.base import (
    AnyArray,
    DecoderFns,
    Inputs,
    Limits,
    Params,
    Picks,
    Pruned,
    Trajectory,
)
from stepprune_jax.policy.buckets import bucket_ladder, choose_bucket
from stepprune_jax.policy.config import PolicyConfig
from stepprune_jax.policy.decoder import POINTER
from stepprune_jax.policy.encoder import read_inputs
from stepprune_jax.policy.jax_settings import implicit_promotion
from stepprune_jax.policy.rollout import read_limits
from stepprune_jax.policy.selection import choose


@implicit_promotion()
def gather(
    selection: Trajectory | Picks,
    features: Float[AnyArray, "b n d"],
    capacity: int,
    *,
    order: str = "raster",
) -> Pruned:
    """Gathers the kept tokens of each row and pads them to a static size.

    Args:
        selection: result of `select` or `choose`.
        features: [b, n, d] tokens to gather from. Any features with one vector per image token can
            be used, such as the tokens before or after the model's projector.
        capacity: k, the padded size. If the counts are traced and a row keeps more than k tokens,
            its first k choices remain.
        order: order of the result: `"raster"` is the order of the tokens in the image, which the
            language model was trained on; `"pick"` is the order of selection.

    Returns:
        The kept tokens, with arrays [b, k, ...]; differentiable in `features`.

    Raises:
        ValueError: the number of features differs from the selection's; `capacity` is outside
            [1, n], or below a concrete count; or an unknown order.
    """
    features = jnp.asarray(features)
    n, num_steps = features.shape[1], selection.action.shape[1]
    if order not in ("raster", "pick"):
        raise ValueError(f"order is {order!r}, expected 'raster' or 'pick'")
    if selection.selected.shape != features.shape[:2]:
        shape = selection.selected.shape
        raise ValueError(f"features is of shape {features.shape}, expected {(*shape, 'd')}")
    count = selection.count
    min_capacity = 1 if isinstance(count, Tracer) else max(1, int(np.max(count, initial=0)))
    if not min_capacity <= capacity <= n:
        raise ValueError(f"capacity is {capacity}, expected within [{min_capacity}, {n}]")
    # The action n is the stop. Padding with n marks missing choices and sorts them last.
    choices = selection.action[:, :capacity]
    choices = jnp.pad(choices, ((0, 0), (0, max(0, capacity - num_steps))), constant_values=n)
    index = jnp.sort(choices, axis=1) if order == "raster" else choices
    valid = index < n
    tokens = jnp.take_along_axis(features, jnp.minimum(index, n - 1)[..., None], axis=1)
    return Pruned(
        index=jnp.where(valid, index, -1),
        tokens=jnp.where(valid[..., None], tokens, 0),
        valid=valid,
        count=jnp.minimum(selection.count, capacity),
    )


_choose = jax.jit(choose)
run_gather = jax.jit(gather, static_argnames=("capacity", "order"))


def as_arrays(limits: Limits, config: PolicyConfig, batch: int, num_tokens: int) -> Limits:
    """Converts the counts in limits to arrays, so that all counts share one compiled program.

    Args:
        limits: bounds on the number of kept tokens.
        config: policy configuration, which fills in missing limits.
        batch: b, the number of rows.
        num_tokens: number of image tokens per row.

    Returns:
        Limits whose counts are int32 arrays [b]: `budget` if it was given, or both bounds.

    Raises:
        ValueError: limits are out of range.
    """
    _, group, row_limits = read_limits(limits, config, batch, num_tokens)
    min_tokens, max_tokens = row_limits
    if limits.budget is not None:
        return dataclasses.replace(limits, budget=max_tokens, group=group)
    return dataclasses.replace(limits, min_tokens=min_tokens, max_tokens=max_tokens, group=group)


# Reading the counts on the host is the purpose of `prune`, so it overrides the transfer guard.
@jax.transfer_guard("allow")
@implicit_promotion()
def prune(
    params: Params,
    config: PolicyConfig,
    inputs: Inputs,
    limits: Limits = Limits(),
    *,
    stop_bias: ArrayLike = 0.0,
    order: str = "raster",
    decoder: DecoderFns = POINTER,
    key: Array | None = None,
) -> Pruned:
    """Prunes a batch of image tokens, given the questions: the inference pathway.

    Runs two compiled programs. The first selects and is compiled once per shape. The host then
    reads the largest count and chooses a bucket. The second program gathers and is compiled once
    per bucket. Inference uses neither noise nor the denoiser. Inside a jitted function counts
    cannot be read: call `choose` and `gather` there.

    Args:
        params: policy weights.
        config: policy configuration.
        inputs: image and question, and the statistics that the policy was trained with.
        limits: bounds on the counts.
        stop_bias: added to the stop logits; see `calibrate_stop_bias`.
        order: order of the kept tokens, as in `gather`.
        decoder: functions of the decoder.
        key: PRNG key of the sampled tokens, as in `select`.

    Returns:
        The kept tokens in the smallest bucket of `bucket_ladder` that holds every row.

    Raises:
        ValueError: features have another width, or limits are out of range.
        TypeError: called inside a jitted function.
    """
    if any(isinstance(leaf, Tracer) for leaf in jax.tree.leaves((params, inputs))):
        raise TypeError(
            "prune reads the counts on the host and cannot be jitted: jit choose(params, config, "
            "inputs, ...) and gather(picks, image, capacity), or Policy.select"
        )
    inputs = read_inputs(params, config, inputs)
    limits = as_arrays(limits, config, *inputs.image.shape[:2])
    picks = _choose(params, config, inputs, limits, stop_bias=stop_bias, decoder=decoder, key=key)
    bucket = choose_bucket(picks.count, bucket_ladder(picks.action.shape[1]))
    return run_gather(picks, inputs.image, bucket, order=order)
