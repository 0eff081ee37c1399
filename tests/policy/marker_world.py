"""A consumer of tokens without weights: random features, and a frozen reader as loss.

Each "image" is a bag of N random tokens. A token carries a marker (one of four) and a payload (one
of eight), each a fixed random direction. The question names a marker; the answer is the histogram
of payloads over the tokens with that marker, of which there are one to eight. A frozen, hand-made
reader stands in for the language model: it attends to tokens by marker and averages their payload
posteriors. The loss is the divergence of its histogram from the true one.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

MARKERS, PAYLOADS, MOST = 4, 8, 8


class Batch(NamedTuple):
    """Random bags with one question each.

    Attributes:
      image: Tokens: marker + payload + noise.
      text: The marker asked for, as one text token.
      answer: True histogram of payloads.
      relevant: Number of tokens with that marker.
    """

    image: Float[Array, "b n d"]
    text: Float[Array, "b 1 d"]
    answer: Float[Array, "b p"]
    relevant: Int[Array, "b"]


class World(NamedTuple):
    """The fixed directions of markers and payloads, orthonormal and scaled."""

    marker: Float[Array, "c d"]
    payload: Float[Array, "p d"]


def make_world(width: int) -> World:
    """Directions of markers and payloads, the same in every run."""
    basis = jnp.linalg.qr(jax.random.normal(jax.random.key(0), (width, MARKERS + PAYLOADS)))[0].T
    scaled = basis * jnp.sqrt(width)
    return World(scaled[:MARKERS], scaled[MARKERS:])


@functools.partial(jax.jit, static_argnames=("batch", "num_tokens"))
def draw_batch(key: Array, world: World, batch: int, num_tokens: int) -> Batch:
    """Draws a batch; `key` is consumed."""
    count_key, order_key, other_key, payload_key, noise_key, text_key = jax.random.split(key, 6)
    asked = jax.random.randint(text_key, (batch,), 0, MARKERS)
    relevant = jax.random.randint(count_key, (batch,), 1, MOST + 1)
    rank = jnp.argsort(jax.random.uniform(order_key, (batch, num_tokens)), axis=1)
    hit = rank < relevant[:, None]
    shift = jax.random.randint(other_key, hit.shape, 1, MARKERS)
    marker = jnp.where(hit, asked[:, None], (asked[:, None] + shift) % MARKERS)
    payload = jax.random.randint(payload_key, hit.shape, 0, PAYLOADS)
    noise = jax.random.normal(noise_key, (*hit.shape, world.marker.shape[1]))
    image = world.marker[marker] + world.payload[payload] + 0.3 * noise
    answer = jnp.einsum("bn,bnp->bp", hit.astype(jnp.float32), jax.nn.one_hot(payload, PAYLOADS))
    answer = answer / relevant[:, None]
    return Batch(image, world.marker[asked][:, None], answer, relevant)


def reader_loss(
    world: World, tokens: Float[Array, "b k d"], valid: Bool[Array, "b k"], batch: Batch
) -> Float[Array, ""]:
    """Mean divergence, in nats, of the frozen reader's histogram from the true one.

    Args:
      world: Directions of markers and payloads.
      tokens: Tokens to read: all of them gated, or a padded selection.
      valid: True at real tokens.
      batch: Question and answer.
    """
    width = tokens.shape[-1]
    by_marker = jnp.einsum("bkd,bd->bk", tokens, batch.text[:, 0]) * (8 / width)
    attention = jax.nn.softmax(jnp.where(valid, by_marker, -1e9), axis=-1)
    posterior = jax.nn.softmax(jnp.einsum("bkd,pd->bkp", tokens, world.payload) * (8 / width))
    read = jnp.einsum("bk,bkp->bp", attention, posterior)
    cross = -jnp.sum(batch.answer * jnp.log(read + 1e-4), axis=-1)
    entropy = -jnp.sum(batch.answer * jnp.log(batch.answer + 1e-9), axis=-1)
    return jnp.mean(cross - entropy)
