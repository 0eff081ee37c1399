"""The selection loop written out in jax.numpy for one purpose: to be differentiated by JAX.

A Python loop over steps without cache, scan, custom derivative or anything of the package. The
choices are given, so nothing in it is discrete. One row, no padding.
"""

import math

import jax
import jax.numpy as jnp
import numpy as np


def layer_norm(weights, x):
    x = x - x.mean(-1, keepdims=True)
    x = x / jnp.sqrt((x**2).mean(-1, keepdims=True) + 1e-5)
    return x * weights["scale"] + weights.get("bias", 0.0)


def dense(weights, x):
    return x @ weights["kernel"] + weights.get("bias", 0.0)


def attend(weights, heads, x, context, mask):
    """Multi-head attention of rows `x` to rows `context`, both normalised."""
    query, key, value = (
        dense(weights[name], rows)
        for name, rows in (("query", x), ("key", context), ("value", context))
    )
    width = query.shape[-1] // heads
    mixed = []
    for h in range(heads):
        part = slice(h * width, (h + 1) * width)
        logits = query[:, part] @ key[:, part].T / math.sqrt(width)
        mixed.append(jax.nn.softmax(jnp.where(mask, logits, -1e300), -1) @ value[:, part])
    return dense(weights["out"], jnp.concatenate(mixed, -1))


def pointer_logits(params, config, memory, queries):
    """Logits of the last of `queries [t, d]` over the memory, through every decoder layer."""
    weights, x = params["decoder"], queries
    causal = np.tri(len(x), dtype=bool)

    def history(layer, x):
        y = layer_norm(layer["norm"], x)
        return x + attend(layer["attention"], config.num_heads, y, y, causal)

    for i in range(config.decoder_layers - 1):
        layer = weights[f"layer_{i}"]
        x, cross = history(layer["history"], x), layer["cross"]
        slots = layer_norm(cross["memory_norm"], memory)
        y = layer_norm(cross["norm"], x)
        x = x + attend(cross["attention"], config.num_heads, y, slots, True)
        hidden = jax.nn.gelu(dense(layer["mlp"]["up"], layer_norm(layer["norm"], x)))
        x = x + dense(layer["mlp"]["down"], hidden)
    pointer = weights["pointer"]
    x = history(pointer["history"], x)
    query = dense(pointer["query"], layer_norm(pointer["norm"], x[-1]))
    keys = dense(pointer["key"], layer_norm(pointer["memory_norm"], memory))
    return keys @ query / math.sqrt(query.shape[-1])


def episode(params, config, memory, stop_bias, choice, least, most, *, straight_through):
    """(prob [t, n], stop_prob [t]) of the episode that points at `choice`, one row."""
    n, left = memory.shape[0] - 1, jnp.ones(memory.shape[0] - 1, bool)
    queries, probs, stops = [params["decoder"]["start"]], [], []
    for t in range(len(choice)):
        raw = pointer_logits(params, config, memory, jnp.stack(queries))
        image = jnp.where(left, raw[:n], -1e300) / config.temperature
        stop = raw[n] + config.stop_bias + stop_bias
        if config.stop == "softmax":
            p_stop = jax.nn.softmax(jnp.append(image, stop / config.temperature))[-1]
        else:
            p_stop = jax.nn.sigmoid((stop - raw[choice[t]]) / config.stop_temperature)
        p_stop = jnp.where(t >= most, 1.0, jnp.where(t < least, 0.0, p_stop))
        p = jnp.append((1 - p_stop) * jax.nn.softmax(image), p_stop)
        probs.append(p[:n])
        stops.append(p_stop)
        onehot = jnp.arange(n + 1) == choice[t]
        credit = onehot - jax.lax.stop_gradient(p) + p if straight_through else onehot * 1.0
        queries.append(memory.T @ credit)
        left = left & ~onehot[:n]
    return jnp.stack(probs), jnp.stack(stops)
