"""Plain references: rows assembled by a loop, and a Llama in float64 numpy without a KV cache."""

import jax
import numpy as np

from stepprune_jax.data.prompts import IMAGE_TOKEN


def loop_assemble(row, kept, n, positions, capacity=1000):
    """Returns (value, image, index, position) of each token of a row, and the next position."""
    tokens, next_position, image = [], 0, 0
    for token in row:
        if token != IMAGE_TOKEN:
            tokens.append((token, -1, -1, next_position))
            next_position += 1
            continue
        if image < len(kept):
            for slot, index in enumerate(kept[image]):
                position = next_position + (index if positions == "original" else slot)
                tokens.append((1000 * (image + 1) + index, image, index, position))
            next_position += n if positions == "original" else len(kept[image])
        image += 1
    if len(tokens) > capacity:
        tokens = tokens[:capacity]
        next_position = max(token[3] for token in tokens) + 1
    return tokens, next_position


def plain_logits(params, config, hidden, position, key_masks):
    """Computes the logits [s, v] of a row.

    Args:
        params: weights of the language model.
        config: its shape.
        hidden: [s, e] embeddings.
        position: [s] position ids.
        key_masks: a mask of keys for each layer: [s] True for tokens that later tokens may attend
            to, or [s, s] with a mask for each query.
    """
    hidden, position = np.asarray(hidden, np.float64), np.asarray(position)
    for layer, mask in enumerate(key_masks):
        hidden, _ = plain_layer(params, config, layer, hidden, position, mask)
    norm_weights = jax.tree.map(lambda x: np.asarray(x, np.float64), params["norm"])
    return _norm(hidden, norm_weights, config) @ np.asarray(params["head"]["kernel"], np.float64)


def plain_layer(params, config, number, hidden, position, visible):
    """Returns the residual stream [s, e] after a layer, and unmasked attention logits [h, s, s]."""
    layer = jax.tree.map(lambda x: np.asarray(x[number], np.float64), params["layers"])
    normed = _norm(hidden, layer["norm1"], config)
    attended, scores = _attention(layer["attention"], config, normed, position, visible)
    hidden = hidden + attended
    normed, mlp = _norm(hidden, layer["norm2"], config), layer["mlp"]
    gate = normed @ mlp["gate"]["kernel"]
    gate = gate / (1 + np.exp(-gate)) * (normed @ mlp["up"]["kernel"])
    return hidden + gate @ mlp["down"]["kernel"], scores


def _norm(x, weights, config):
    root_mean_square = np.sqrt(np.square(x).mean(-1, keepdims=True) + config.rms_norm_eps)
    return x / root_mean_square * weights["scale"]


def _attention(weights, config, x, position, visible):
    s, c = len(x), config.head_dim
    heads = {name: config.num_kv_heads for name in ("key", "value")} | {"query": config.num_heads}
    query, key, value = (
        (x @ weights[name]["kernel"]).reshape(s, heads[name], c).swapaxes(0, 1)
        for name in ("query", "key", "value")
    )
    angle = position[:, None] * config.rope_theta ** -(np.arange(0, c, 2) / c)
    rotation = np.exp(1j * angle)

    def rotated(x):
        product = (x[..., : c // 2] + 1j * x[..., c // 2 :]) * rotation
        return np.concatenate([product.real, product.imag], axis=-1)

    group = config.num_heads // config.num_kv_heads
    query, key = rotated(query), np.repeat(rotated(key), group, axis=0)
    scores = query @ key.swapaxes(1, 2) / np.sqrt(c)
    allowed = np.tril(np.ones((s, s), bool)) & visible
    # The result of a hidden token is not used. It attends to itself, so the result is finite.
    masked = np.where(allowed | np.eye(s, dtype=bool), scores, -np.inf)
    exponentials = np.exp(masked - masked.max(-1, keepdims=True))
    result = exponentials / exponentials.sum(-1, keepdims=True) @ np.repeat(value, group, axis=0)
    return result.swapaxes(0, 1).reshape(s, -1) @ weights["out"]["kernel"], scores
