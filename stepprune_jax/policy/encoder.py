"""Cross-modal encoder (Eq. 3) and the decoder memory with its stop slot (Eq. 4)."""

import jax.numpy as jnp
from jax.typing import ArrayLike
from jaxtyping import Array, Bool, Float

from stepprune_jax.policy import layers
from stepprune_jax.policy.checks import AnyArray, checked, require, require_finite
from stepprune_jax.policy.config import PolicyConfig
from stepprune_jax.policy.params import Params, check_params


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


def _project_text(params: Params, config: PolicyConfig, text, text_gate):
    """Returns LN(W_p E), times g_txt where the gate is read as printed."""
    projection = params["encoder"]["text_projection"]
    text = layers.layer_norm(projection["norm"], layers.dense(projection, text))
    return text * text_gate.astype(text.dtype) if config.text_gate == "printed" else text


def _attention_mask(config: PolicyConfig, image_mask, text_mask) -> Bool[Array, "b 1 #s s"]:
    """Builds the attention mask: no padding; the causal ablation orders image tokens."""
    n, l = image_mask.shape[1], text_mask.shape[1]
    keys = jnp.concatenate([image_mask, text_mask], axis=1)[:, None, None]
    if config.encoder_attention != "causal":
        return keys
    # Text must not carry later image tokens back to earlier ones: it sees text only.
    allowed = jnp.ones((n + l, n + l), bool)
    return allowed.at[:n, :n].set(jnp.tri(n, dtype=bool)).at[n:, :n].set(False) & keys


@checked
def encode(
    params: Params,
    config: PolicyConfig,
    image: Float[AnyArray, "b n feature_width"],
    text: Float[AnyArray, "b l text_width"] | None,
    *,
    image_mask: Bool[AnyArray, "b n"] | None = None,
    text_mask: Bool[AnyArray, "b l"] | None = None,
    text_gate: ArrayLike = 1.0,
) -> Float[Array, "b n d"]:
    """Encodes image tokens jointly with the question, Eq. (3): H = Enc([X; g LN(W_p E)])_{1..N}.

    Args:
        params: policy weights.
        config: policy configuration.
        image: image tokens X of any floating dtype.
        text: word embeddings E of the question (never of the answer); `None` encodes the image
            alone.
        image_mask: True at real image tokens; padding may hold anything and affects no result.
        text_mask: True at real text tokens.
        text_gate: g_txt in [0, 1]; see `PolicyConfig.text_gate` for where it acts.

    Returns:
        H in the compute dtype, zero at padded positions.

    Raises:
        ValueError: weights of another configuration, a wrong rank, width or dtype, text given to a
            policy without text, or non-finite features, where these can be read before tracing.
    """
    check_params(params, config, ("encoder",))
    b, n, width = image.shape
    require(width == config.feature_width, "width of image", width, str(config.feature_width))
    require(b > 0 and n > 0, "image", f"of shape {image.shape}", "at least one token")
    require_finite("image", image, image_mask)
    image_mask = jnp.ones((b, n), bool) if image_mask is None else jnp.asarray(image_mask)
    if text is None:
        text = jnp.zeros((b, 0, config.text_width), image.dtype)
        text_mask = jnp.zeros((b, 0), bool)
    else:
        require(
            text.shape[-1] == config.text_width > 0,
            "width of text",
            text.shape[-1],
            str(config.text_width or "no text (text_width=0)"),
        )
        require_finite("text", text, text_mask)
    text_mask = jnp.ones(text.shape[:2], bool) if text_mask is None else jnp.asarray(text_mask)

    dtype = layers.compute_dtype(config, jnp.asarray(image).dtype)
    x = jnp.where(image_mask[..., None], image, 0).astype(dtype)
    if config.policy_width != config.feature_width:
        x = layers.dense(params["encoder"]["image_projection"], x)
    gate = jnp.asarray(text_gate, layers.score_dtype(x.dtype))
    mask = _attention_mask(config, image_mask, text_mask)
    bias = None
    if text.shape[1]:
        text = jnp.where(text_mask[..., None], text, 0).astype(dtype)
        text = _project_text(params, config, text, gate)
        # Not a concatenation, for the same reason as in the decoder.
        x = jnp.pad(x, ((0, 0), (0, text.shape[1]), (0, 0))).at[:, n:].set(text)
        if config.text_gate == "attention":
            # log of the smallest normal float32 is -87: g = 0 switches text off, finitely.
            log_gate = jnp.log(jnp.maximum(gate, jnp.finfo(jnp.float32).tiny))
            is_text = jnp.arange(x.shape[1]) >= n
            bias = jnp.where(is_text, log_gate, 0)[None, None, None]
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
    return jnp.where(image_mask[..., None], x, 0)


@checked
def memory(params: Params, encoded: Float[AnyArray, "b n d"]) -> Float[Array, "b m d"]:
    """Appends the learned stop slot, Eq. (4): M = [H; s_stop], so that slot n is the stop."""
    stop = params["stop"].astype(encoded.dtype)
    require(
        encoded.shape[-1] == stop.shape[0],
        "encoded",
        f"of shape {encoded.shape}",
        f"width {stop.shape[0]}",
    )
    stop = jnp.broadcast_to(stop, (encoded.shape[0], 1, stop.shape[0]))
    return jnp.concatenate([encoded, stop], axis=1)
