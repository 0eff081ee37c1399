"""A second implementation of the policy in plain numpy, in float64 and with loops.

It was written from the paper and the docstrings of the package, and shares no code with it. Padding
is removed instead of masked, so a padded token cannot influence results. There is no cache: each
step recomputes the decoder from all queries of the episode.
"""

import itertools
import math
from typing import NamedTuple

import numpy as np

IMPOSSIBLE = -1e9  # the documented log-probability of impossible events


def layer_norm(weights, x):
    x = x - x.mean()
    x = x / math.sqrt((x * x).mean() + 1e-5)
    return x * weights["scale"] + weights.get("bias", 0.0)


def dense(weights, x):
    return x @ weights["kernel"] + weights.get("bias", 0.0)


def mlp(weights, x):
    h = dense(weights["up"], x)
    # The tanh form of the GELU, jax.nn.gelu's default.
    h = 0.5 * h * (1 + np.tanh(math.sqrt(2 / math.pi) * (h + 0.044715 * h**3)))
    return dense(weights["down"], h)


def softmax(logits):
    top = max(logits)
    if top == -math.inf:
        return [0.0] * len(logits)
    powers = [math.exp(value - top) for value in logits]
    return [power / sum(powers) for power in powers]


def attend(query, keys, values, num_heads, bias=None):
    """Attention of one query over lists of keys and values, head after head."""
    width = len(query) // num_heads
    bias = [0.0] * len(keys) if bias is None else bias
    heads = []
    for h in range(num_heads):
        part = slice(h * width, (h + 1) * width)
        logits = [
            float(query[part] @ key[part]) / math.sqrt(width) + b
            for key, b in zip(keys, bias, strict=True)
        ]
        mixed = np.zeros(width)
        for share, value in zip(softmax(logits), values, strict=True):
            mixed = mixed + share * value[part]
        heads.append(mixed)
    return np.concatenate(heads)


def encoder_block(weights, config, x, num_image, gate):
    """One pre-norm block over `num_image` image tokens followed by text tokens."""
    y = [layer_norm(weights["norm1"], row) for row in x]
    attention = weights["attention"]
    keys = [dense(attention["key"], row) for row in y]
    values = [dense(attention["value"], row) for row in y]
    log_gate = math.log(gate) if gate > 0 else -math.inf
    is_causal, out = config.encoder_attention == "causal", []
    for i, row in enumerate(x):
        # With causal attention, an image token sees earlier ones and text; text sees only text.
        visible = [
            j for j in range(len(x)) if not is_causal or j >= num_image or j <= i < num_image
        ]
        biased = config.text_gate == "attention"
        bias = [log_gate if biased and j >= num_image else 0.0 for j in visible]
        query = dense(attention["query"], y[i])
        mixed = attend(
            query, [keys[j] for j in visible], [values[j] for j in visible], config.num_heads, bias
        )
        row = row + dense(attention["out"], mixed)
        out.append(row + mlp(weights["mlp"], layer_norm(weights["norm2"], row)))
    return out


def encode_row(weights, config, image, text, image_mask, text_mask, gate):
    """H of one row; zero where the image is padded."""
    encoder, real = weights["encoder"], [i for i in range(len(image)) if image_mask[i]]
    x = [image[i] for i in real]
    if "image_projection" in encoder:
        x = [dense(encoder["image_projection"], row) for row in x]
    for j in range(0 if text is None else len(text)):
        if text_mask[j]:
            projection = encoder["text_projection"]
            row = layer_norm(projection["norm"], dense(projection, text[j]))
            x.append(gate * row if config.text_gate == "printed" else row)
    for i in range(config.encoder_layers):
        x = encoder_block(encoder[f"block_{i}"], config, x, len(real), gate)
    encoded = np.zeros((len(image), config.policy_width))
    for position, i in enumerate(real):
        encoded[i] = x[position]
    return encoded


def first_query_row(weights, config, text, text_mask, gate):
    """Returns the question's addition to the start token."""
    words = [] if text is None else [text[j] for j in range(len(text)) if text_mask[j]]
    if config.first_query == "learned" or not words:
        return np.zeros(config.policy_width)
    question, projection = weights["encoder"]["question"], weights["encoder"]["text_projection"]
    words = [layer_norm(projection["norm"], dense(projection, word)) for word in words]
    shares = softmax([float(word @ question["pool"]) for word in words])
    pooled = sum(share * word for share, word in zip(shares, words, strict=True))
    return gate * dense(question, pooled)


def memory_row(weights, encoded):
    return np.concatenate([encoded, weights["stop"][None]])


def history(weights, config, x):
    """Applies causal self-attention over the queries."""
    attention, out = weights["attention"], []
    y = [layer_norm(weights["norm"], row) for row in x]
    keys = [dense(attention["key"], row) for row in y]
    values = [dense(attention["value"], row) for row in y]
    for t, row in enumerate(x):
        query = dense(attention["query"], y[t])
        mixed = attend(query, keys[: t + 1], values[: t + 1], config.num_heads)
        out.append(row + dense(attention["out"], mixed))
    return out


def decoder_layer(layer, config, slots, x):
    """Applies a decoder layer to all queries."""
    x, cross = history(layer["history"], config, x), layer["cross"]
    normed = [layer_norm(cross["memory_norm"], slot) for slot in slots]
    keys = [dense(cross["attention"]["key"], row) for row in normed]
    values = [dense(cross["attention"]["value"], row) for row in normed]
    for t, row in enumerate(x):
        query = dense(cross["attention"]["query"], layer_norm(cross["norm"], row))
        mixed = attend(query, keys, values, config.num_heads)
        row = row + dense(cross["attention"]["out"], mixed)
        x[t] = row + mlp(layer["mlp"], layer_norm(layer["norm"], row))
    return x


def pointer_logits(weights, config, slots, queries):
    """Logits of the last query over the real slots (the stop last), from scratch."""
    decoder, x = weights["decoder"], list(queries)
    for i in range(config.decoder_layers - 1):
        x = decoder_layer(decoder[f"layer_{i}"], config, slots, x)
    pointer = decoder["pointer"]
    x = history(pointer["history"], config, x)
    query = dense(pointer["query"], layer_norm(pointer["norm"], x[-1]))
    keys = [dense(pointer["key"], layer_norm(pointer["memory_norm"], slot)) for slot in slots]
    logits = [float(query @ key) / math.sqrt(len(query)) for key in keys]
    if config.stop == "hazard":
        layer = decoder["hazard"]
        timed = [q + math.log(1 + t) * layer["clock"] for t, q in enumerate(queries)]
        read = layer_norm(layer["read"], decoder_layer(layer, config, slots, timed)[-1])
        logits[-1] = float(read @ slots[-1])
    return logits


class Row(NamedTuple):
    """A trajectory of one row; `open` marks the steps before which tokens are left."""

    action: np.ndarray
    choice: np.ndarray
    log_prob: np.ndarray
    prob: np.ndarray
    stop_prob: np.ndarray
    log_continue: np.ndarray
    margin: np.ndarray
    alive: np.ndarray
    count: int
    selected: np.ndarray
    open: np.ndarray


def _log(x):
    return math.log(x) if x > 0 else IMPOSSIBLE


def step_probabilities(config, logits, stop_logit, step, min_tokens, max_tokens):
    """(p(i) over the tokens left, p(stop), 1 - p(stop)) from a dict of logits, Eqs. (8)-(9)."""
    if step >= max_tokens:
        return dict.fromkeys(logits, 0.0), 1.0, 0.0
    tokens = list(logits)
    conditional = dict(
        zip(tokens, softmax([logits[i] / config.temperature for i in tokens]), strict=True)
    )
    if step < min_tokens:
        return conditional, 0.0, 1.0
    if config.stop == "softmax":
        scaled = [logits[i] / config.temperature for i in tokens]
        probabilities = softmax([*scaled, stop_logit / config.temperature])
        return (
            dict(zip(tokens, probabilities[:-1], strict=True)),
            probabilities[-1],
            sum(probabilities[:-1]),
        )
    max_logit = 0.0 if config.stop == "hazard" else max(logits.values())
    odds = (stop_logit - max_logit) / config.stop_temperature
    stop_prob, continue_prob = 1 / (1 + math.exp(-odds)), 1 / (1 + math.exp(odds))
    return (
        {i: continue_prob * probability for i, probability in conditional.items()},
        stop_prob,
        continue_prob,
    )


def select_row(
    weights,
    config,
    memory,
    image_mask,
    *,
    steps,
    min_tokens,
    max_tokens,
    stop_bias,
    question=0.0,
    logits_fn=pointer_logits,
):
    """Runs the selection loop of one row."""
    n = len(memory) - 1
    remaining = [i for i in range(n) if image_mask[i]]
    count_limit = min(max_tokens, len(remaining))
    min_count = min(min_tokens, count_limit)
    slots = [memory[i] for i in remaining] + [memory[n]]
    slot_of = {i: position for position, i in enumerate(remaining)}
    row = Row(
        np.full(steps, n),
        np.zeros(steps, int),
        np.full((steps, n), IMPOSSIBLE),
        np.zeros((steps, n)),
        np.ones(steps),
        np.full(steps, IMPOSSIBLE),
        np.zeros(steps),
        np.zeros(steps, bool),
        0,
        np.zeros(n, bool),
        np.zeros(steps, bool),
    )
    queries, alive, count = [weights["decoder"]["start"] + question], True, 0
    for t in range(steps):
        row.alive[t] = alive
        if not remaining:
            alive = False
            continue
        row.open[t] = True
        raw = logits_fn(weights, config, slots, queries)
        logits = {i: raw[slot_of[i]] for i in remaining}
        stop_logit = raw[-1] + config.stop_bias + stop_bias
        best = remaining[0]
        for i in remaining:
            if logits[i] > logits[best]:
                best = i
        prob, stop, go = step_probabilities(config, logits, stop_logit, t, min_count, count_limit)
        for i in remaining:
            row.prob[t, i], row.log_prob[t, i] = prob[i], _log(prob[i])
        row.stop_prob[t], row.log_continue[t] = stop, _log(go)
        row.margin[t] = stop_logit - (0.0 if config.stop == "hazard" else logits[best])
        if t >= count_limit or (t >= min_count and row.margin[t] > 0):
            alive = False
        if alive:
            row.action[t], row.selected[best], count = best, True, count + 1
        row.choice[t] = best
        remaining.remove(best)
        queries.append(memory[best])
    return row._replace(count=count)


def alive_probability(stop_prob):
    return [math.prod(1 - p for p in stop_prob[:t]) for t in range(len(stop_prob))]


def expected_count(stop_prob):
    """Computes E[K] by enumerating all sequences of stop decisions."""
    total = 0.0
    for stops in itertools.product([False, True], repeat=len(stop_prob)):
        weight = math.prod(p if s else 1 - p for p, s in zip(stop_prob, stops, strict=True))
        total += weight * (stops.index(True) if True in stops else len(stops))
    return total


def soft_scores(prob, stop_prob, decay, aggregation):
    alive, scores = alive_probability(stop_prob), np.zeros(prob.shape[1])
    steps = [t for t in range(len(prob)) if prob[t].any()]  # no token can be chosen beyond a bound
    for i in range(prob.shape[1]):
        for t in range(len(prob)):
            weight = {
                "discounted": alive[t] * decay ** (t + 1),
                "alive": alive[t],
                "uniform": 1.0,
                "last": float(t == max(steps, default=0)),
            }[aggregation]
            scores[i] += weight * prob[t, i]
    return scores


def log_scores(prob, stop_prob, decay, aggregation):
    return np.array([_log(s) for s in soft_scores(prob, stop_prob, decay, aggregation)])


def soft_topk(scores, k, temperature, where):
    """alpha_i = F(s_i / tau - b), b by bisection."""
    alpha, present = np.zeros(len(scores)), [i for i in range(len(scores)) if where[i]]
    if k >= len(present) or k <= 0:
        alpha[present] = float(k > 0)
        return alpha

    def share(u):
        return 0.5 * math.exp(u) if u < 0 else 1 - 0.5 * math.exp(-u)

    z = {i: scores[i] / temperature for i in present}
    low, high = min(z.values()) - 50, max(z.values()) + 50
    for _ in range(200):
        middle = (low + high) / 2
        if sum(share(value - middle) for value in z.values()) > k:
            low = middle
        else:
            high = middle
    for i in present:
        alpha[i] = share(z[i] - (low + high) / 2)
    return alpha


def denoise(weights, x):
    w, out = weights["denoiser"], []
    for row in x:
        row = row + dense(w["out"], dense(w["value"], layer_norm(w["norm1"], row)))
        out.append(row + mlp(w["mlp"], layer_norm(w["norm2"], row)))
    return np.array(out)


def gather_row(action, features, capacity, order):
    """(index, tokens, valid) of one row: the first `capacity` picks, padded behind."""
    n = len(features)
    kept = [int(a) for a in action if a < n][:capacity]
    kept = sorted(kept) if order == "raster" else kept
    index, tokens = np.full(capacity, -1), np.zeros((capacity, features.shape[1]))
    for position, i in enumerate(kept):
        index[position], tokens[position] = i, features[i]
    return index, tokens, index >= 0
