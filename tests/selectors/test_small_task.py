"""A task with 40 tokens, one of which holds the answer: the learned stop keeps few tokens."""

import functools

import jax
import jax.numpy as jnp
import optax
import pytest

import stepprune_jax as sp
from stepprune_jax.selectors import RlooSettings
from stepprune_jax.selectors.diagnosis import measure_stop

N, D, VALUES, ROWS = 40, 16, 16, 32


def directions(seed, count):
    """Returns random vectors of length sqrt(D)."""
    x = jax.random.normal(jax.random.key(seed), (count, D))
    return x * D**0.5 / jnp.linalg.norm(x, axis=1, keepdims=True)


def draw(key, rows):
    """Returns images of (key, value) tokens, questions that name a key, and the values."""
    key_key, value_key, question_key, noise_key = jax.random.split(key, 4)
    keys = jnp.argsort(jax.random.uniform(key_key, (rows, 2 * N)), axis=1)[:, :N]
    value = jax.random.randint(value_key, (rows, N), 0, VALUES)
    question_index = jax.random.randint(question_key, (rows, 1), 0, N)
    tokens = jnp.concatenate([directions(0, 2 * N)[keys], directions(1, VALUES)[value]], axis=2)
    image = tokens + 0.1 * jax.random.normal(noise_key, tokens.shape)
    text = directions(0, 2 * N)[jnp.take_along_axis(keys, question_index, axis=1)]
    return image, text, jnp.take_along_axis(value, question_index, axis=1)[:, 0]


def losses(tokens, text, answer, valid=True):
    """Returns the cross-entropy of each row, for a frozen reader that looks up the key."""
    match = jnp.einsum("bnd,bd->bn", tokens[..., :D], text[:, 0]) * (12 / D)
    attention = jax.nn.softmax(jnp.where(valid, match, -1e9), axis=1)
    readout = jnp.einsum("bn,bnd->bd", attention, tokens[..., D:])
    logits = readout @ directions(1, VALUES).T * (8 / D)
    return optax.softmax_cross_entropy_with_integer_labels(logits, answer)


def gate_loss(policy, key, image, text, answer, share):
    def lm_loss(tokens):
        return losses(tokens, text, answer).mean()

    return policy.train_loss(key, image, text, lm_loss, progress=sp.Progress(share))[0]


def set_loss(policy, key, image, text, answer, share):
    def answer_losses(kept):
        loss_with = functools.partial(losses, text=text, answer=answer)
        return jax.vmap(lambda x, real: loss_with(x, valid=real), 1, 1)(kept.tokens, kept.valid)

    settings = RlooSettings(samples=8)
    return policy.rloo_loss(key, image, text, answer_losses, settings)[0]


@pytest.mark.slow
@pytest.mark.parametrize(("objective", "steps"), [(gate_loss, 200), (set_loss, 250)])
def test_a_few_hundred_updates_teach_the_stop(objective, steps):
    config = sp.PolicyConfig(feature_width=2 * D, text_width=D, num_heads=4)
    stats = sp.update_stats(sp.FeatureStats.start(2 * D), draw(jax.random.key(9), 256)[0])
    policy = sp.StepPrune.init(jax.random.key(1), config, stats)
    rate = optax.warmup_cosine_decay_schedule(0.0, 1e-3, steps // 20, steps, 1e-4)
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(rate, weight_decay=1e-4))

    def update(carry, number):
        params, moments = carry
        key = jax.random.fold_in(jax.random.key(2), number)
        data_key, loss_key = jax.random.split(key)

        def loss(params):
            batch = draw(data_key, ROWS)
            return objective(policy.replace(params=params), loss_key, *batch, number / steps)

        updates, moments = optimizer.update(jax.grad(loss)(params), moments, params)
        return (optax.apply_updates(params, updates), moments), None

    @jax.jit
    def train(params):
        return jax.lax.scan(update, (params, optimizer.init(params)), jnp.arange(steps))[0][0]

    policy = policy.replace(params=train(policy.params))
    image, text, answer = draw(jax.random.key(3), 256)
    stops = measure_stop(policy, sp.Inputs(image, text, stats=stats))
    assert not stops.finding and stops.mean < 0.2 * N
    kept = policy.prune(image, text)
    assert jnp.mean(losses(kept.tokens, text, answer, kept.valid) < 1) > 0.9
