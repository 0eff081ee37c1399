"""StepPrune in front of a model of your own: statistics, training, stop, saving, pruning.

    python examples/own_model.py

The stand-in for your model takes a minute on a CPU. An "image" is a bag of 64 tokens; each carries
a marker and a value. The question names a marker, and the answer is how often each value comes with
it. Replace `draw` by your tower and data, and `lm_loss` by your projector and language model.
"""

import tempfile
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax

import stepprune_jax as sp

# --- Your model and data ---

N, D, MARKERS, VALUES = 64, 32, 4, 8
basis = jnp.linalg.qr(jax.random.normal(jax.random.key(0), (D, D)))[0] * D**0.5
frozen = {"marker": basis[:MARKERS], "value": basis[MARKERS : MARKERS + VALUES]}


class Batch(NamedTuple):
    """Inputs of a training step."""

    image: jax.Array  # [b, n, d] tokens of the vision tower
    text: jax.Array  # [b, l, e] embeddings of the question, never of the answer
    answer: jax.Array  # what your loss needs


def draw(key, rows):
    """Draws a batch; in each image, 2 to 20 % of the tokens carry the marker in question."""
    marker_key, value_key, asked_key, share_key, hit_key, noise_key = jax.random.split(key, 6)
    asked = jax.random.randint(asked_key, (rows, 1), 0, MARKERS)
    other = jax.random.randint(marker_key, (rows, N), 0, MARKERS - 1)
    other = other + (other >= asked)
    share = jax.random.uniform(share_key, (rows, 1), minval=0.02, maxval=0.2)
    hit = jax.random.uniform(hit_key, (rows, N)).at[:, 0].set(0) < share
    value = jax.random.randint(value_key, (rows, N), 0, VALUES)
    tokens = frozen["marker"][jnp.where(hit, asked, other)] + frozen["value"][value]
    tokens = tokens + 0.3 * jax.random.normal(noise_key, tokens.shape)
    counts = jnp.einsum("bn,bnv->bv", hit.astype(float), jax.nn.one_hot(value, VALUES))
    image = 7 + 3 * tokens  # like real features, far from zero mean and unit variance
    return Batch(image, frozen["marker"][asked], counts / counts.sum(1, keepdims=True))


def lm_loss(frozen, tokens, batch, valid=True):
    """Returns the cross-entropy of a frozen reader, which attends to tokens by their marker."""
    tokens = (tokens - 7) / 3
    match = jnp.einsum("bnd,bd->bn", tokens, batch.text[:, 0]) * (8 / D)
    attention = jax.nn.softmax(jnp.where(valid, match, -1e9), axis=1)
    value = jax.nn.softmax(jnp.einsum("bnd,vd->bnv", tokens, frozen["value"]) * (8 / D))
    read = jnp.einsum("bn,bnv->bv", attention, value)
    return -jnp.mean(jnp.sum(batch.answer * jnp.log(read + 1e-4), axis=1))


# --- Statistics of the features, once, before training ---

stats = sp.FeatureStats.start(D)
for number in range(8):
    stats = sp.update_stats(stats, draw(jax.random.key(100 + number), 64).image)

# --- Training ---

steps = 400
config = sp.PolicyConfig(feature_width=D, text_width=D, num_heads=4)
policy = sp.Policy.init(jax.random.key(1), config, stats)
rate = optax.warmup_cosine_decay_schedule(0.0, 2e-3, steps // 10, steps, 1e-4)
optimiser = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(rate, weight_decay=1e-4))


@jax.jit
def update(policy, moments, frozen, key, progress):
    """Takes one step; frozen weights are an argument, as closures become program constants."""
    data_key, gate_key = jax.random.split(key)
    batch = draw(data_key, 32)

    def loss(params):
        return policy.replace(params=params).train_loss(
            gate_key,
            batch.image,
            batch.text,
            lambda tokens: lm_loss(frozen, tokens, batch),
            progress=sp.Progress(progress),
        )

    (value, (metrics, _)), grads = jax.value_and_grad(loss, has_aux=True)(policy.params)
    updates, moments = optimiser.update(grads, moments, policy.params)
    params = optax.apply_updates(policy.params, updates)
    return policy.replace(params=params), moments, metrics | {"loss": value}


moments = optimiser.init(policy.params)
for number in range(steps):
    key = jax.random.fold_in(jax.random.key(2), number)
    policy, moments, metrics = update(policy, moments, frozen, key, number / steps)
    if number % 50 == 0 or number == steps - 1:
        print(number, {name: round(float(value), 3) for name, value in metrics.items()})

# --- The stop at any mean count; saving and loading ---

held_out = draw(jax.random.key(3), 256)
policy = policy.calibrate([(held_out.image, held_out.text)])
path = sp.save_policy(policy, f"{tempfile.mkdtemp()}/policy.safetensors")
policy = sp.load_policy(path)

# --- Pruning ---

batch = draw(jax.random.key(4), 256)
everything = float(lm_loss(frozen, batch.image, batch))
for how in ({}, {"mean_budget": 8}, {"budget": 8}):
    pruned = policy.prune(batch.image, batch.text, **how)
    kept = float(lm_loss(frozen, pruned.tokens, batch, pruned.valid))
    first = float(lm_loss(frozen, batch.image[:, 1:9], batch))  # any other eight
    print(f"{how}: {pruned.count.mean():.1f} of {N} tokens, loss {kept:.2f}", end="; ")
    print(f"eight without choice {first:.2f}, all tokens {everything:.2f}")
