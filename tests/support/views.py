"""Inputs of pruners, without a model."""

import jax
import jax.numpy as jnp

from stepprune_jax.models.llava.config import LlavaConfig
from stepprune_jax.models.sequence import Sequence
from stepprune_jax.pruning import PrunerInputs
from stepprune_jax.testing import tiny_hf_config

# Compiled once for each untrained pruner and capacity.
select = jax.jit(lambda pruner, view, capacity: pruner.keep(view, capacity), static_argnums=2)


def view(tokens, *taps, count, valid=None, **fields):
    """Returns inputs of a pruner; `count` is a number or one per row."""
    r = len(tokens)
    inputs = PrunerInputs(
        tokens=jnp.asarray(tokens),
        mask=None if valid is None else jnp.asarray(valid),
        grid=jnp.ones((r, 2), jnp.int32),
        text=jnp.zeros((r, 1, 2)),
        text_valid=jnp.zeros((r, 1), bool),
        number=jnp.zeros(r, jnp.int32),
        seed=jnp.zeros(r, jnp.uint32),
        count=jnp.broadcast_to(jnp.asarray(count, jnp.int32), (r,)),
        taps=tuple(map(jnp.asarray, taps)),
    )
    return inputs._replace(**{name: jnp.asarray(value) for name, value in fields.items()})


def llava(layers=32, side=24, feature_layer=-2, **text):
    """Returns the configuration of a LLaVA with (side / 8)^2 visual tokens."""
    raw = tiny_hf_config(text={"num_hidden_layers": layers} | text, vision={"image_size": side})
    return LlavaConfig.from_hf(raw | {"vision_feature_layer": feature_layer})


def rows(image, hidden=None, length=None, index=None, grid=None):
    """Returns a `Sequence` of rows; `image` [b, s] is the image of each slot, -1 for text."""
    image = jnp.asarray(image, jnp.int32)
    b, s = image.shape
    slots = jnp.broadcast_to(jnp.arange(s, dtype=jnp.int32), (b, s))
    hidden = jnp.zeros((b, s, 2)) if hidden is None else jnp.asarray(hidden, jnp.float32)
    length = jnp.full(b, s, jnp.int32) if length is None else jnp.asarray(length, jnp.int32)
    index = jnp.where(image < 0, -1, slots) if index is None else jnp.asarray(index, jnp.int32)
    return Sequence(hidden, slots[:, None], length, length, image, index, grid=grid)
