"""Cross-modal encoder (Eq. 3) and the decoder memory with its stop slot (Eq. 4)."""

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
    rows: int,
    bias: Float[Array, "1 1 1 s"] | None,
) -> Float[Array, "b r d"]:
    """Applies a pre-norm transformer block and returns its first `rows` positions."""
    y = layers.layer_norm(params["norm1"], x)
    weights = params["attention"]
    query = layers.split_heads(layers.dense(weights["query"], y[:, :rows]), num_heads)
    key = layers.split_heads(layers.dense(weights["key"], y), num_heads)
    value = layers.split_heads(layers.dense(weights["value"], y), num_heads)
    mixed = layers.merge_heads(layers.attention(query, key, value, mask[:, :, :rows], bias))
    x = x[:, :rows] + layers.dense(weights["out"], mixed)
    return x + layers.mlp(params["mlp"], layers.layer_norm(params["norm2"], x))


def _first_query(params: Params, text, words, gate) -> Float[Array, "b d"]:
    """Pools the words of LN(W_p E) by a softmax of one learned score each, and projects them."""
    weights, wide = params["encoder"]["question"], layers.score_dtype(text.dtype)
    score = jnp.einsum("bld,d->bl", text.astype(wide), weights["pool"].astype(wide))
    share = jax.nn.softmax(jnp.where(words, score, layers.MASKED), axis=1) * words
    pooled = jnp.einsum("bl,bld->bd", share.astype(text.dtype), text)
    return layers.dense(weights, pooled) * gate.astype(text.dtype)


def _attention_mask(config: PolicyConfig, image_mask, text_mask) -> Bool[Array, "b 1 #s s"]:
    """Builds the attention mask: no padding; the causal ablation orders image tokens."""
    n, l = image_mask.shape[1], text_mask.shape[1]
    keys = jnp.concatenate([image_mask, text_mask], axis=1)[:, None, None]
    if config.encoder_attention != "causal":
        return keys
    # Text must not carry later image tokens back to earlier ones: it sees text only.
    allowed = jnp.ones((n + l, n + l), bool)
    return allowed.at[:n, :n].set(jnp.tri(n, dtype=bool)).at[n:, :n].set(False) & keys


def read_inputs(params: Params, config: PolicyConfig, inputs: Inputs) -> Inputs:
    """Returns inputs that fit a policy, without text that the policy does not read.

    Raises:
        ValueError: an argument of another type, or an array of another shape or dtype.
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
        inputs: image and question, standardised by their statistics.
        text_gate: g_txt in [0, 1]; see `PolicyConfig.text_gate` for where it acts.

    Returns:
        H in the compute dtype, zero at padded positions.

    Raises:
        ValueError: features or embeddings of another width, or masks of another shape.
    """
    return encode_with_query(params, config, inputs, text_gate)[0]


def encode_with_query(
    params: Params, config: PolicyConfig, inputs: Inputs, text_gate: ArrayLike = 1.0
) -> tuple[Float[Array, "b n d"], Float[Array, "b d"] | None]:
    """Returns H of `encode`, and what the question adds to the start token, if anything.

    The latter is scaled by g_txt; see `PolicyConfig.first_query`.
    """
    inputs = read_inputs(params, config, inputs)
    image, real = standardise(jnp.asarray(inputs.image), inputs.stats), inputs.real
    n, dtype = image.shape[1], layers.compute_dtype(config, image.dtype)
    x = jnp.where(real[..., None], image, 0).astype(dtype)
    if config.policy_width != config.feature_width:
        x = layers.dense(params["encoder"]["image_projection"], x)
    text, words, bias = inputs.text, jnp.zeros((image.shape[0], 0), bool), None
    asked = None
    if text is not None and text.shape[1]:
        words = inputs.text_mask
        words = jnp.ones(text.shape[:2], bool) if words is None else jnp.asarray(words)
        gate = jnp.asarray(text_gate, layers.score_dtype(x.dtype))
        text = jnp.where(words[..., None], text, 0).astype(dtype)
        projection = params["encoder"]["text_projection"]
        text = layers.layer_norm(projection["norm"], layers.dense(projection, text))
        if config.first_query == "question":
            asked = _first_query(params, text, words, gate)
        if config.text_gate == "printed":
            text = text * gate.astype(dtype)
        # Not a concatenation, for the same reason as in the decoder.
        x = jnp.pad(x, ((0, 0), (0, text.shape[1]), (0, 0))).at[:, n:].set(text)
        if config.text_gate == "attention":
            # log of the smallest normal float32 is -87: g = 0 switches text off, finitely.
            log_gate = jnp.log(jnp.maximum(gate, jnp.finfo(jnp.float32).tiny))
            bias = jnp.where(jnp.arange(x.shape[1]) >= n, log_gate, 0)[None, None, None]
    mask = _attention_mask(config, real, words)
    for i in range(config.encoder_layers):
        last = i == config.encoder_layers - 1
        x = _block(
            params["encoder"][f"block_{i}"],
            x,
            mask,
            num_heads=config.num_heads,
            rows=n if last else x.shape[1],
            bias=bias,
        )
    return jnp.where(real[..., None], x, 0), asked


def memory(params: Params, encoded: Float[Array, "b n d"]) -> Float[Array, "b m d"]:
    """Appends the learned stop slot, Eq. (4): M = [H; s_stop], so that slot n is the stop."""
    stop = params["stop"].astype(encoded.dtype)
    stop = jnp.broadcast_to(stop, (encoded.shape[0], 1, stop.shape[0]))
    return jnp.concatenate([encoded, stop], axis=1)
