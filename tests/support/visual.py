"""Visual tokens of images that all have the same grid, as `vlm.assemble` takes them."""

import jax.numpy as jnp

from stepprune_jax.models import vlm


def visual_of(config, tokens, index=None, valid=None):
    """A `vlm.Visual` of projected tokens [b, j, k, e]: all of each image's, or those at `index`."""
    b, j, k = tokens.shape[:3]
    index = jnp.arange(k, dtype=jnp.int32) if index is None else jnp.asarray(index, jnp.int32)
    index = jnp.broadcast_to(index, (b, j, k))
    valid = jnp.ones((b, j, k), bool) if valid is None else jnp.asarray(valid)
    grid = jnp.broadcast_to(jnp.array(config.grid, jnp.int32), (b, j, 2))
    return vlm.Visual(jnp.asarray(tokens), valid, index, index, grid)
