"""Rows assembled by a plain loop, and a Llama in float64 numpy: no cache, tokens may be hidden."""

import jax
import numpy as np

from stepprune_jax.models.vlm import IMAGE_TOKEN


def loop_assemble(row, kept, n, positions, capacity=1000):
    """(mark, image, index, position) of each token of a row, and the next position."""
    tokens, place, image = [], 0, 0
    for token in row:
        if token != IMAGE_TOKEN:
            tokens.append((token, -1, -1, place))
            place += 1
            continue
        if image < len(kept):
            for slot, index in enumerate(kept[image]):
                at = place + (index if positions == "original" else slot)
                tokens.append((1000 * (image + 1) + index, image, index, at))
            place += n if positions == "original" else len(kept[image])
        image += 1
    if len(tokens) > capacity:
        tokens = tokens[:capacity]
        place = max(token[3] for token in tokens) + 1
    return tokens, place


def plain_logits(params, config, hidden, position, seen):
    """Logits [s, v] of a row of embeddings [s, e].

    Args:
        params: weights of the language model.
        config: its shape.
        hidden: [s, e] embeddings.
        position: [s] position ids.
        seen: for each layer [s] True = may be attended to by itself and by what follows it, or
            [s, s] by query.
    """
    hidden, position = np.asarray(hidden, np.float64), np.asarray(position)
    for number, visible in enumerate(seen):
        hidden, _ = plain_layer(params, config, number, hidden, position, visible)
    final = jax.tree.map(lambda x: np.asarray(x, np.float64), params["norm"])
    return _norm(hidden, final, config) @ np.asarray(params["head"]["kernel"], np.float64)


def plain_layer(params, config, number, hidden, position, visible):
    """Residual stream [s, e] after a layer, and its attention logits [h, s, s] before any mask."""
    layer = jax.tree.map(lambda x: np.asarray(x[number], np.float64), params["layers"])
    normed = _norm(hidden, layer["norm1"], config)
    mixed, scores = _attention(layer["attention"], config, normed, position, visible)
    hidden = hidden + mixed
    normed, mlp = _norm(hidden, layer["norm2"], config), layer["mlp"]
    gate = normed @ mlp["gate"]["kernel"]
    gate = gate / (1 + np.exp(-gate)) * (normed @ mlp["up"]["kernel"])
    return hidden + gate @ mlp["down"]["kernel"], scores


def _norm(x, weights, config):
    root = np.sqrt(np.square(x).mean(-1, keepdims=True) + config.rms_norm_eps)
    return x / root * weights["scale"]


def _attention(weights, config, x, position, visible):
    s, c = len(x), config.head_dim
    heads = {name: config.num_kv_heads for name in ("key", "value")} | {"query": config.num_heads}
    query, key, value = (
        (x @ weights[name]["kernel"]).reshape(s, heads[name], c).swapaxes(0, 1)
        for name in ("query", "key", "value")
    )
    angle = position[:, None] * config.rope_theta ** -(np.arange(0, c, 2) / c)
    turn = np.exp(1j * angle)

    def rotated(y):
        turned = (y[..., : c // 2] + 1j * y[..., c // 2 :]) * turn
        return np.concatenate([turned.real, turned.imag], axis=-1)

    group = config.num_heads // config.num_kv_heads
    query, key = rotated(query), np.repeat(rotated(key), group, axis=0)
    scores = query @ key.swapaxes(1, 2) / np.sqrt(c)
    allowed = np.tril(np.ones((s, s), bool)) & visible
    # A hidden token's own result does not matter; it sees itself, so that it is finite.
    masked = np.where(allowed | np.eye(s, dtype=bool), scores, -np.inf)
    share = np.exp(masked - masked.max(-1, keepdims=True))
    mixed = share / share.sum(-1, keepdims=True) @ np.repeat(value, group, axis=0)
    return mixed.swapaxes(0, 1).reshape(s, -1) @ weights["out"]["kernel"], scores
