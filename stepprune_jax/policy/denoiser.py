"""Local denoiser, Eq. (14): one transformer block whose attention mask is the diagonal."""

import jax.numpy as jnp
from jaxtyping import Array, Float

from stepprune_jax.policy import layers
from stepprune_jax.policy.checks import AnyArray, checked
from stepprune_jax.policy.config import PolicyConfig
from stepprune_jax.policy.params import Params


@checked
def denoise(
    params: Params, config: PolicyConfig, x: Float[AnyArray, "b n d"]
) -> Float[Array, "b n d"]:
    """X^ = Denoise(X~; mask = diag): each token is updated from itself alone.

    Under the diagonal mask the softmax has one entry, so attention is the linear map W_o W_v LN(x)
    and queries and keys do not exist. The block starts as the identity and is used in training
    only; at inference the LLM reads the selected tokens as they are.

    Args:
        params: policy weights.
        config: policy configuration.
        x: gated tokens.

    Returns:
        Denoised tokens in the dtype of `x`.
    """
    weights, dtype = params["denoiser"], jnp.asarray(x).dtype
    x = jnp.asarray(x, layers.compute_dtype(config, dtype))
    value = layers.dense(weights["value"], layers.layer_norm(weights["norm1"], x))
    x = x + layers.dense(weights["out"], value)
    x = x + layers.mlp(weights["mlp"], layers.layer_norm(weights["norm2"], x))
    return x.astype(dtype)
