"""From a selection to a short prefix: kept tokens, padded to a bucket."""

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
    """Gathers the kept tokens X_S into a bucket.

    Args:
        selection: result of `select` or `choose`.
        features: tokens to gather from, N per row (before or after the projector: it is
            token-wise).
        capacity: bucket size. If a row keeps more (an error where the count can be read), its first
            `capacity` picks remain.
        order: `"raster"` keeps the spatial order the language model was trained on; `"pick"` is the
            order of selection.

    Returns:
        The pruned prefix, differentiable in `features`.

    Raises:
        ValueError: features of other tokens, a capacity outside [1, N] or below a count that can be
            read, or an unknown order.
    """
    features = jnp.asarray(features)
    n, steps = features.shape[1], selection.action.shape[1]
    if order not in ("raster", "pick"):
        raise ValueError(f"order is {order!r}, expected 'raster' or 'pick'")
    if selection.selected.shape != features.shape[:2]:
        shape = selection.selected.shape
        raise ValueError(f"features is of shape {features.shape}, expected {(*shape, 'd')}")
    count = selection.count
    least = 1 if isinstance(count, Tracer) else max(1, int(np.max(count, initial=0)))
    if not least <= capacity <= n:
        raise ValueError(f"capacity is {capacity}, expected within [{least}, {n}]")
    picks = selection.action[:, :capacity]
    picks = jnp.pad(picks, ((0, 0), (0, max(0, capacity - steps))), constant_values=n)
    index = jnp.sort(picks, axis=1) if order == "raster" else picks
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
    """Returns limits whose counts are arrays, so that all of them share a program.

    Raises:
        ValueError: limits out of range.
    """
    _, group, rows = read_limits(limits, config, batch, num_tokens)
    if limits.budget is not None:
        return dataclasses.replace(limits, budget=rows.max_tokens, group=group)
    least, most = rows
    return dataclasses.replace(limits, min_tokens=least, max_tokens=most, group=group)


@jax.transfer_guard("allow")  # a function of the host, whatever a program forbids elsewhere
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
    """Prunes a batch of image tokens for its questions: the inference pathway.

    Runs two compiled programs: one selects; the host reads the largest count and chooses a bucket;
    the other gathers. The first is compiled once per shape, the second once per bucket. There is no
    noise and no denoiser. Inside a jitted function, where no count can be read, call `choose` and
    `gather`.

    Args:
        params: policy weights.
        config: policy configuration.
        inputs: image and question, and the statistics the policy was trained with.
        limits: bounds on the counts.
        stop_bias: added to the stop logits; see `calibrate_stop_bias`.
        order: order of the kept tokens, as in `gather`.
        decoder: functions of the decoder.
        key: PRNG key of the draws, as in `select`.

    Returns:
        The kept tokens in the smallest bucket of `bucket_ladder` that holds every row.

    Raises:
        ValueError: features of another width, or limits out of range.
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
