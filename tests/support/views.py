"""What a pruner is shown, without a model."""

import jax
import jax.numpy as jnp

from stepprune_jax.models.llava.config import LlavaConfig
from stepprune_jax.models.sequence import Sequence
from stepprune_jax.pruning import PrunerInputs
from stepprune_jax.testing import tiny_hf_config

# Compiled once for each pruner and capacity; the pruner is not trained.
select = jax.jit(lambda pruner, view, capacity: pruner.keep(view, capacity), static_argnums=2)


def view(tokens, *taps, count, **others):
    """A view of tokens [r, n, d] and intermediates; `count` is one number or one a row."""
    r = len(tokens)
    seen = PrunerInputs(
        tokens=jnp.asarray(tokens),
        valid=None,
        grid=jnp.ones((r, 2), jnp.int32),
        text=jnp.zeros((r, 1, 2)),
        text_valid=jnp.zeros((r, 1), bool),
        number=jnp.zeros(r, jnp.int32),
        seed=jnp.zeros(r, jnp.uint32),
        count=jnp.broadcast_to(jnp.asarray(count, jnp.int32), (r,)),
        taps=tuple(map(jnp.asarray, taps)),
    )
    return seen._replace(**{name: jnp.asarray(value) for name, value in others.items()})


def llava(layers=32, side=24, feature_layer=-2, **text):
    """A LLaVA of (side / 8)^2 visual tokens."""
    raw = tiny_hf_config(text={"num_hidden_layers": layers} | text, vision={"image_size": side})
    return LlavaConfig.from_hf(raw | {"vision_feature_layer": feature_layer})


def rows(image, hidden=None, length=None, index=None, grid=None):
    """Rows of tokens whose images [b, s] are known, -1 for text; by default each is its index."""
    image = jnp.asarray(image, jnp.int32)
    b, s = image.shape
    slots = jnp.broadcast_to(jnp.arange(s, dtype=jnp.int32), (b, s))
    hidden = jnp.zeros((b, s, 2)) if hidden is None else jnp.asarray(hidden, jnp.float32)
    length = jnp.full(b, s, jnp.int32) if length is None else jnp.asarray(length, jnp.int32)
    index = jnp.where(image < 0, -1, slots) if index is None else jnp.asarray(index, jnp.int32)
    return Sequence(hidden, slots[:, None], length, length, image, index, grid=grid)
