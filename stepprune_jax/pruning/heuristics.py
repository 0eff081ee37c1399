"""Orders that need no training: random, a uniform grid, the class token's attention."""

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from stepprune_jax.models.layers import Tap
from stepprune_jax.models.llava.config import LlavaConfig


def random_order(key: Array, batch: int, num_tokens: int) -> Int[Array, "b n"]:
    """A random order of the tokens for each row.

    Args:
        key: PRNG key; consumed.
        batch: rows b.
        num_tokens: tokens n of an image.

    Returns:
        [b, n] int32 permutations.
    """
    noise = jax.random.uniform(key, (batch, num_tokens))
    return jnp.argsort(noise, axis=1).astype(jnp.int32)


def grid_indices(height: int, width: int, budget: int) -> Int[np.ndarray, "k"]:
    """Exactly `budget` tokens spread evenly over a grid, in raster order.

    The rows of the selection, about sqrt(k height / width) of them, lie evenly over the height.
    Each holds its share of the tokens (shares differ by one at most), evenly over the width; where
    two columns are equally near to a place, every other row takes the left one.

    Args:
        height: rows of the grid.
        width: columns of the grid.
        budget: tokens k to choose.

    Returns:
        [k] int32 indices row * width + column, ascending.

    Raises:
        ValueError: a budget outside 1 to height * width.
    """
    if not 1 <= budget <= height * width:
        raise ValueError(f"budget is {budget}, expected 1 to {height * width} ({height} x {width})")
    fewest = -(-budget // width)
    wanted = round((budget * height / width) ** 0.5)
    lines = min(max(wanted, fewest, 1), height, budget)
    chosen = []
    for line in range(lines):
        count = budget * (line + 1) // lines - budget * line // lines
        row = (2 * line + 1) * height // (2 * lines)
        places = (2 * np.arange(count) + 1) * width
        # The nearest column, halves up or down: floor(x) and ceil(x) - 1 of x = place + 1/2.
        columns = places // (2 * count) if line % 2 == 0 else -(-places // (2 * count)) - 1
        chosen.append(row * width + columns)
    return np.concatenate(chosen).astype(np.int32)


def grid_order(height: int, width: int, budget: int, batch: int) -> Int[np.ndarray, "b k"]:
    """`grid_indices` for each of `batch` rows."""
    return np.broadcast_to(grid_indices(height, width, budget), (batch, budget))


def cls_tap(config: LlavaConfig) -> Tap:
    """The tap that gives the class token's attention in the block whose output is projected.

    Args:
        config: the model's configuration.

    Returns:
        A tap for `vlm.encode_image`.

    Raises:
        ValueError: the model projects the embedding, which no block has made.
    """
    depth = config.vision.num_layers
    state = config.feature_layer % (depth + 1)
    if state == 0:
        raise ValueError(
            f"vision_feature_layer {config.feature_layer} is the embedding of a tower of {depth} "
            "layers: no block attends before it, so there is no [CLS] attention to rank by"
        )
    return Tap("attention", state - 1)


def cls_order(attention: Float[Array, "b h m"]) -> Int[Array, "b n"]:
    """Patches by the class token's attention, mean over heads; most attended first.

    Args:
        attention: [b, h, n + 1] weights of the class token's query, itself first.

    Returns:
        [b, n] int32 patch indices; ties by position.
    """
    mean = jnp.mean(attention.astype(jnp.float32), axis=1)[:, 1:]
    return jnp.argsort(-mean, axis=1, stable=True).astype(jnp.int32)
