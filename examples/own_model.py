"""StepPrune in front of a model of your own: statistics, training, diagnosis, stop, pruning.

    pip install . optax    # in a clone of the repository
    python examples/own_model.py

An "image" is a bag of 32 records, each a key
and a value; the question names a key, and the answer is its value. Of two random tokens one is the
right one in 6 % of the questions, so that nothing is learned unless the question is read: with
`text_width=0`, or with the paper's first query, `first_query="learned"`, which takes four times as
many updates, the diagnosis says so. Replace `draw` by your tower and data, and `losses` by your
projector and language model.
"""

import sys
import tempfile
from typing import NamedTuple

import jax
import jax.numpy as jnp

import stepprune_jax as sp

try:
    import optax
except ModuleNotFoundError:
    sys.exit("error: this example trains with optax, which is not installed: pip install optax")

# --- Your model and data ---

N, D, VALUES = 32, 48, 16
half = D // 2


def directions(seed, count):
    """Returns random directions of length sqrt(D / 2)."""
    x = jax.random.normal(jax.random.key(seed), (count, half))
    return x * half**0.5 / jnp.linalg.norm(x, axis=1, keepdims=True)


frozen = {"key": directions(0, 2 * N), "value": directions(1, VALUES)}


class Batch(NamedTuple):
    """Inputs of a training step."""

    image: jax.Array  # [b, n, d] tokens of the vision tower
    text: jax.Array  # [b, l, e] embeddings of the question, never of the answer
    answer: jax.Array  # what your loss needs


def draw(key, rows):
    """Draws a batch; the keys of an image differ."""
    key_key, value_key, asked_key, noise_key = jax.random.split(key, 4)
    keys = jnp.argsort(jax.random.uniform(key_key, (rows, 2 * N)), axis=1)[:, :N]
    value = jax.random.randint(value_key, (rows, N), 0, VALUES)
    asked = jax.random.randint(asked_key, (rows, 1), 0, N)
    tokens = jnp.concatenate([frozen["key"][keys], frozen["value"][value]], axis=2)
    image = 7 + 3 * (tokens + 0.1 * jax.random.normal(noise_key, tokens.shape))  # like real ones
    text = frozen["key"][jnp.take_along_axis(keys, asked, axis=1)]
    return Batch(image, text, jnp.take_along_axis(value, asked, axis=1)[:, 0])


def losses(frozen, tokens, batch, valid=True):
    """Returns each row's cross-entropy of a frozen reader that looks up the key, and if right."""
    tokens = (tokens - 7) / 3
    match = jnp.einsum("bnd,bd->bn", tokens[..., :half], batch.text[:, 0]) * (12 / half)
    attention = jax.nn.softmax(jnp.where(valid, match, -1e9), axis=1)
    read = jnp.einsum("bn,bnd->bd", attention, tokens[..., half:])
    logits = read @ frozen["value"].T * (8 / half)
    right = jnp.argmax(logits, axis=1) == batch.answer
    return optax.softmax_cross_entropy_with_integer_labels(logits, batch.answer), right


# --- Statistics of the features, once, before training ---

stats = sp.FeatureStats.start(D)
for number in range(8):
    stats = sp.update_stats(stats, draw(jax.random.key(100 + number), 64).image)

# --- Training ---

steps = 200
config = sp.PolicyConfig(feature_width=D, text_width=half, num_heads=4)
policy = sp.StepPrune.init(jax.random.key(1), config, stats)
rate = optax.warmup_cosine_decay_schedule(0.0, 1e-3, steps // 20, steps, 1e-4)
optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(rate, weight_decay=1e-4))


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
            lambda tokens: losses(frozen, tokens, batch)[0].mean(),
            progress=sp.Progress(progress),
        )

    (value, (metrics, _)), grads = jax.value_and_grad(loss, has_aux=True)(policy.params)
    updates, moments = optimizer.update(grads, moments, policy.params)
    params = optax.apply_updates(policy.params, updates)
    return policy.replace(params=params), moments, metrics | {"loss": value}


moments = optimizer.init(policy.params)
for number in range(steps):
    key = jax.random.fold_in(jax.random.key(2), number)
    policy, moments, metrics = update(policy, moments, frozen, key, number / steps)
    if number % 50 == 0 or number == steps - 1:
        print(number, {name: round(float(value), 3) for name, value in metrics.items()})

# --- Does it learn? ---

held_out = draw(jax.random.key(3), 512)
kept = (held_out.image, held_out.text)
for diagnosis in policy.diagnose(
    lambda pruned: losses(frozen, pruned.tokens, held_out, pruned.valid), *kept, budgets=(1, 4)
):
    print(diagnosis)

# --- The stop at any mean count; saving and loading ---

policy = policy.calibrate([kept])
path = sp.save_policy(policy, f"{tempfile.mkdtemp()}/policy.safetensors")
policy = sp.load_policy(path)

# --- Pruning ---

batch = draw(jax.random.key(4), 256)
for budget in ("adaptive", "mean:3", 4):
    pruned = policy.with_budget(budget).prune(batch.image, batch.text)
    loss, right = losses(frozen, pruned.tokens, batch, pruned.valid)
    share = f"{100 * right.mean():.1f} % right"
    print(f"{budget}: {pruned.count.mean():.1f} of {N} tokens, loss {loss.mean():.2f}, {share}")
