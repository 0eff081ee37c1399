"""Trains the tower to label patches: the first stage.

Labels are arrays over the training images. A softmax head predicts `class_*` [i, n] at each visual
token, and a linear head predicts `value_*` [i, n, c], NaN where undefined. A head on the class
token predicts `image_*` [i, p], which is 0 or 1. The labels of a smaller image come first, followed
by padding with any value. The heads are discarded after training.
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array, Float

from experiments.pretrain.images import Images, fit_labels, token_mask
from experiments.pretrain.small import small_of
from stepprune_jax.models.backbone import Backbone
from stepprune_jax.models.stack import Params

Labels = dict[str, Array]


def init_heads(labels: dict[str, np.ndarray], width: int) -> dict[str, Array]:
    """Returns zero heads for labels. The largest label determines the number of classes."""
    heads = {}
    for name, array in labels.items():
        size = int(array.max()) + 1 if name.startswith("class_") else array.shape[-1]
        heads[name] = jnp.zeros((width + 1, size))
    return heads


def linear_head(head: Array, hidden: Float[Array, "*b d"]) -> Float[Array, "*b c"]:
    """Applies a linear head [d + 1, c], whose last row is the bias, to normalized features."""
    mean = jnp.mean(hidden, -1, keepdims=True)
    normalized = (hidden - mean) * jax.lax.rsqrt(jnp.var(hidden, -1, keepdims=True) + 1e-5)
    return normalized @ head[:-1] + head[-1]


def tower_loss(
    trained: Params, backbone: Backbone, images: Images, labels: Labels
) -> tuple[Float[Array, ""], dict[str, Array]]:
    """Returns the sum of the losses of all heads, and scalars for the log."""
    tokens, class_token = small_of(backbone).states(trained, backbone, images.pixels)
    n = tokens.shape[1]
    real = token_mask(backbone, images, n)
    total, scalars = jnp.zeros(()), {}

    def mean(values):
        return jnp.sum(jnp.where(real, values, 0)) / jnp.sum(real)

    for name, label in labels.items():
        head = trained["heads"][name]
        if name.startswith("image_"):
            logit = linear_head(head, class_token)
            total += jnp.mean(optax.sigmoid_binary_cross_entropy(logit, label.astype(jnp.float32)))
            continue
        output, label = linear_head(head, tokens), fit_labels(label, n)
        if name.startswith("class_"):
            label = label.astype(jnp.int32)
            total += mean(optax.softmax_cross_entropy_with_integer_labels(output, label))
            scalars[name] = mean(jnp.argmax(output, -1) == label)
        else:
            label = label.astype(jnp.float32)
            has_label = jnp.isfinite(label) & real[..., None]
            error = jnp.where(has_label, output - jnp.where(has_label, label, 0), 0)
            count = jnp.maximum(jnp.sum(has_label), 1)
            total += 4 * jnp.sum(error**2) / count
            scalars[name] = jnp.sum(jnp.abs(error)) / count
    return total, scalars
