"""Cross-modal encoder, Eq. (3), and the decoder memory with its stop slot, Eq. (4)."""

from __future__ import annotations

from collections.abc import Mapping

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike
from jaxtyping import Array, Bool, Float

from stepprune_jax.policy import layers
from stepprune_jax.policy.base import Inputs, Params
from stepprune_jax.policy.config import PolicyConfig
from stepprune_jax.policy.jax_settings import implicit_promotion
from stepprune_jax.policy.noise import standardise


def _block(
    params: Params,
    x: Float[Array, "b s d"],
    mask: Bool[Array, "b 1 #s s"],
    *,
    num_heads: int,
    num_queries: int,
    bias: Float[Array, "1 1 1 s"] | None,
) -> Float[Array, "b q d"]:
    """Applies a pre-norm transformer block to the leading positions of a sequence.

    Args:
        params: weights of the block.
        x: [b, s, d] activations of the sequence [image; text].
        mask: True at keys that a query attends to.
        num_heads: number of attention heads.
        num_queries: q, the number of leading positions to compute; all s positions are keys.
        bias: additive bias of the attention logits per key, or None.

    Returns:
        [b, q, d] activations of the first `num_queries` positions.
    """
    normed = layers.layer_norm(params["norm1"], x)
    weights = params["attention"]
    query = layers.split_heads(layers.dense(weights["query"], normed[:, :num_queries]), num_heads)
    key = layers.split_heads(layers.dense(weights["key"], normed), num_heads)
    value = layers.split_heads(layers.dense(weights["value"], normed), num_heads)
    mixed = layers.merge_heads(layers.attention(query, key, value, mask[:, :, :num_queries], bias))
    x = x[:, :num_queries] + layers.dense(weights["out"], mixed)
    return x + layers.mlp(params["mlp"], layers.layer_norm(params["norm2"], x))


def _pool_question(
    params: Params,
    text: Float[Array, "b l d"],
    text_mask: Bool[Array, "b l"],
    gate: Float[Array, ""],
) -> Float[Array, "b d"]:
    """Pools the words of each question to one vector, which is added to the first query.

    The words are averaged with attention weights, a softmax of one learned score per word, and the
    mean is projected.

    Args:
        params: policy weights.
        text: [b, l, d] projected and normalized word embeddings.
        text_mask: [b, l] True at real words.
        gate: [] g_txt, a factor on the result.

    Returns:
        [b, d] vector; zero for a question without words.
    """
    weights, dtype = params["encoder"]["question"], layers.score_dtype(text.dtype)
    score = jnp.einsum("bld,d->bl", text.astype(dtype), weights["pool"].astype(dtype))
    # The product with the mask makes a question without words contribute zero.
    word_weights = jax.nn.softmax(jnp.where(text_mask, score, layers.MASKED), axis=1) * text_mask
    pooled = jnp.einsum("bl,bld->bd", word_weights.astype(text.dtype), text)
    return layers.dense(weights, pooled) * gate.astype(text.dtype)


def _attention_mask(
    config: PolicyConfig, image_mask: Bool[Array, "b n"], text_mask: Bool[Array, "b l"]
) -> Bool[Array, "b 1 #s s"]:
    """Builds the attention mask of the sequence [image; text] of s = n + l positions.

    Args:
        config: policy configuration. With `encoder_attention="causal"`, image tokens attend to all
            words, but only to image tokens up to their position.
        image_mask: [b, n] True at real image tokens.
        text_mask: [b, l] True at real words.

    Returns:
        True where a query (third axis) attends to a key (last axis); False for keys in the padding.
    """
    n, l = image_mask.shape[1], text_mask.shape[1]
    key_mask = jnp.concatenate([image_mask, text_mask], axis=1)[:, None, None]
    if config.encoder_attention != "causal":
        return key_mask
    # Text attends to text only. Otherwise it would carry later image tokens back to earlier tokens.
    allowed = jnp.ones((n + l, n + l), bool)
    return allowed.at[:n, :n].set(jnp.tri(n, dtype=bool)).at[n:, :n].set(False) & key_mask


def read_inputs(params: Params, config: PolicyConfig, inputs: Inputs) -> Inputs:
    """Checks the inputs of a policy, and removes text that the policy does not read.

    Args:
        params: policy weights.
        config: policy configuration.
        inputs: image and question.

    Returns:
        The inputs, without text if `config.text_width` is 0.

    Raises:
        ValueError: an argument has another type, or an array has another shape or dtype.
    """
    for name, value, kind, example in (
        ("params", params, Mapping, "the weights of a policy, such as policy.params"),
        ("config", config, PolicyConfig, "a PolicyConfig"),
        ("inputs", inputs, Inputs, "Inputs(image, text)"),
    ):
        if not isinstance(value, kind):
            raise ValueError(f"{name} is a {type(value).__name__}, expected {example}")
    if not config.text_width:
        inputs = inputs._replace(text=None, text_mask=None)
    inputs.check(config.feature_width, config.text_width)
    return inputs


@implicit_promotion()
def encode(
    params: Params, config: PolicyConfig, inputs: Inputs, text_gate: ArrayLike = 1.0
) -> Float[Array, "b n d"]:
    """Encodes image tokens jointly with the question, Eq. (3): H = Enc([X; g LN(W_p E)])_{1..N}.

    Args:
        params: policy weights.
        config: policy configuration; with `text_width=0` text is not read.
        inputs: image and question. The image is standardized by `inputs.stats`.
        text_gate: g_txt in [0, 1]; see `PolicyConfig.text_gate` for its effect.

    Returns:
        [b, n, d] H in the compute dtype; zero in the padding.

    Raises:
        ValueError: features or embeddings have another width, or masks another shape.
    """
    return encode_with_query(params, config, inputs, text_gate)[0]


def encode_with_query(
    params: Params, config: PolicyConfig, inputs: Inputs, text_gate: ArrayLike = 1.0
) -> tuple[Float[Array, "b n d"], Float[Array, "b d"] | None]:
    """Encodes image tokens as `encode` does, and pools the question for the first query.

    Args:
        params: policy weights.
        config: policy configuration; with `text_width=0` text is not read.
        inputs: image and question. The image is standardized by `inputs.stats`.
        text_gate: g_txt in [0, 1]; see `PolicyConfig.text_gate` for its effect.

    Returns:
        A tuple (encoded, question). encoded: [b, n, d] H. question: [b, d] pooled words, which are
        added to the decoder's first query; None unless `config.first_query` is "question" and there
        are words.
    """
    inputs = read_inputs(params, config, inputs)
    image, real = standardise(jnp.asarray(inputs.image), inputs.stats), inputs.real
    n, dtype = image.shape[1], layers.compute_dtype(config, image.dtype)
    x = jnp.where(real[..., None], image, 0).astype(dtype)
    if config.policy_width != config.feature_width:
        x = layers.dense(params["encoder"]["image_projection"], x)
    text, text_mask, bias = inputs.text, jnp.zeros((image.shape[0], 0), bool), None
    question = None
    if text is not None and text.shape[1]:
        text_mask = inputs.text_mask
        text_mask = jnp.ones(text.shape[:2], bool) if text_mask is None else jnp.asarray(text_mask)
        gate = jnp.asarray(text_gate, layers.score_dtype(x.dtype))
        text = jnp.where(text_mask[..., None], text, 0).astype(dtype)
        projection = params["encoder"]["text_projection"]
        text = layers.layer_norm(projection["norm"], layers.dense(projection, text))
        if config.first_query == "question":
            question = _pool_question(params, text, text_mask, gate)
        if config.text_gate == "printed":
            text = text * gate.astype(dtype)
        # The sequence [image; text]. `pad` and `at[].set`, not a concatenation: XLA's CUDA backend
        # cannot compile some fused concatenations, see `decoder._decode`.
        x = jnp.pad(x, ((0, 0), (0, text.shape[1]), (0, 0))).at[:, n:].set(text)
        if config.text_gate == "attention":
            # log g is added to the logits of all text keys. The log of the smallest normal float32
            # is -87: g = 0 hides the text, and the logits stay finite.
            log_gate = jnp.log(jnp.maximum(gate, jnp.finfo(jnp.float32).tiny))
            bias = jnp.where(jnp.arange(x.shape[1]) >= n, log_gate, 0)[None, None, None]
    mask = _attention_mask(config, real, text_mask)
    for i in range(config.encoder_layers):
        is_last = i == config.encoder_layers - 1
        x = _block(
            params["encoder"][f"block_{i}"],
            x,
            mask,
            num_heads=config.num_heads,
            num_queries=n if is_last else x.shape[1],  # the result needs no text positions
            bias=bias,
        )
    return jnp.where(real[..., None], x, 0), question


def memory(params: Params, encoded: Float[Array, "b n d"]) -> Float[Array, "b m d"]:
    """Appends the learned stop slot to encoded tokens, Eq. (4): M = [H; s_stop], m = n + 1."""
    stop = params["stop"].astype(encoded.dtype)
    stop = jnp.broadcast_to(stop, (encoded.shape[0], 1, stop.shape[0]))
    return jnp.concatenate([encoded, stop], axis=1)
