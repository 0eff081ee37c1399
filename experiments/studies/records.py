"""Tells whether policies find the one record, or the two in a row, that a question needs.

    python -m experiments.studies.records --tokens 32 --hops 1 --seeds 0 1 2

An "image" is a bag of records: a key, a link, which is the key of another record, and a value. The
question names a key. With one hop the answer is the value of its record, with two that of the
record behind its link, so that both are needed. A frozen reader follows the links without error if
it sees all. Printed is the share of questions whose records are all among two kept tokens, after
training through the gate, or, with `--sampled`, with a share of the updates on sampled sets, the
last ones; "auto" chooses the share, 1 or .2, as the recipe of `train.py` does. All take their best
tokens, in training and after it, which is better here.
"""

import argparse
import functools
import itertools
import json
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

import stepprune_jax as sp
from stepprune_jax.cli.command_line import Parser, exit_with
from stepprune_jax.registry import selector_of
from stepprune_jax.selectors import AutoSelectConfig, RlooSettings
from stepprune_jax.training.settings import GATE_SHARE

HALF, VALUES, KEYS, ROWS = 24, 16, 256, 32
WIDTH = 3 * HALF


class Batch(NamedTuple):
    """Questions: tokens [b, n, d], embeddings [b, 1, e], answers [b], records needed [b, hops]."""

    image: jax.Array
    text: jax.Array
    answer: jax.Array
    needed: jax.Array


class Task(NamedTuple):
    """What a policy is trained for, in front of a frozen reader.

    Attributes:
        frozen: arrays of the reader.
        draw: (frozen, key, rows) -> a batch.
        losses: (frozen, tokens, batch, valid) -> each row's cross-entropy.
    """

    frozen: Any
    draw: Callable[..., Any]
    losses: Callable[..., jax.Array]


def directions(seed: int, count: int) -> jax.Array:
    """Returns random vectors of length sqrt(HALF)."""
    x = jax.random.normal(jax.random.key(seed), (count, HALF))
    return x * HALF**0.5 / jnp.linalg.norm(x, axis=1, keepdims=True)


def world() -> dict[str, jax.Array]:
    """Returns the embeddings of keys and values."""
    return {"key": directions(0, KEYS), "value": directions(1, VALUES)}


def draw(frozen: dict[str, jax.Array], key: jax.Array, rows: int, n: int, hops: int) -> Batch:
    """Draws questions about bags of n records; links are a cycle in random order."""
    keys = jax.random.split(key, 5)
    names = jnp.argsort(jax.random.uniform(keys[0], (rows, KEYS)), axis=1)[:, :n]
    cycle = jnp.argsort(jax.random.uniform(keys[1], (rows, n)), axis=1)
    rows = jnp.arange(rows)[:, None]
    link = jnp.zeros((rows, n), int).at[rows, cycle].set(jnp.roll(cycle, -1, axis=1))
    value = jax.random.randint(keys[2], (rows, n), 0, VALUES)
    first = jax.random.randint(keys[3], (rows, 1), 0, n)
    needed = first if hops == 1 else jnp.concatenate([first, link[rows, first]], axis=1)
    parts = [frozen["key"][names], frozen["key"][names[rows, link]], frozen["value"][value]]
    tokens = jnp.concatenate(parts, axis=2)
    image = 7 + 3 * (tokens + 0.1 * jax.random.normal(keys[4], tokens.shape))
    return Batch(image, frozen["key"][names[rows, first]], value[rows[:, 0], needed[:, -1]], needed)


def losses(frozen: dict[str, jax.Array], tokens, batch: Batch, valid: Any = True) -> jax.Array:
    """Computes each row's cross-entropy of a reader that looks up key after key."""
    key, link, value = jnp.split((tokens - 7) / 3, 3, axis=-1)
    query = batch.text[:, 0]
    for _ in range(batch.needed.shape[1]):
        match = jnp.einsum("bnd,bd->bn", key, query) * (12 / HALF)
        attention = jax.nn.softmax(jnp.where(valid, match, -1e9), axis=1)
        query = jnp.einsum("bn,bnd->bd", attention, link)
    read = jnp.einsum("bn,bnd->bd", attention, value)
    logits = read @ frozen["value"].T * (8 / HALF)
    return optax.softmax_cross_entropy_with_integer_labels(logits, batch.answer)


def train(
    task: Task, config: Any, seed: int, updates: int, sampled: float | str
) -> tuple[sp.Policy, dict[str, Any]]:
    """Trains a policy; returns it, and the share of updates on sets, with what they gain."""
    frozen, about = task.frozen, {}
    stats = sp.FeatureStats.start(config.feature_width)
    stats = sp.update_stats(stats, task.draw(frozen, jax.random.key(99), 256).image)
    policy = type(selector_of(config)).init(jax.random.key(seed), config, stats)
    settings = RlooSettings(samples=8, longest=0.25, stops=0.5)

    def of_sets(frozen, batch):
        one = jax.vmap(lambda s: task.losses(frozen, s.tokens, batch, s.valid), 1, 1)
        return lambda kept: one(kept)

    if sampled == "auto":
        batch, recorded = task.draw(frozen, jax.random.key(seed + 2000), 512), []

        def noted(kept):
            recorded.append(of_sets(frozen, batch)(kept))
            return recorded[-1]

        signal = policy.measure_subset_gain(
            jax.random.key(seed + 3000), batch.image, batch.text, noted, settings
        )
        sampled = 1.0 if signal.suffices else round(1 - GATE_SHARE, 2)
        # Among the sets of a question, of its own image and of another's.
        spreads = [float(jnp.exp(-loss).std(axis=1).mean()) for loss in recorded[:2]]
        about = {"signal": signal._asdict() | {"gain": signal.gain, "spreads": spreads}}
    about, first = {"sampled": sampled} | about, round(updates * (1 - float(sampled)))

    def stage(policy, first, last, sampling):
        count = last - first
        rate = optax.warmup_cosine_decay_schedule(0.0, 1e-3, count // 20, count, 1e-4)
        optimiser = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(rate))

        def loss(params, frozen, key, share):
            data_key, draw_key = jax.random.split(key)
            batch, now = task.draw(frozen, data_key, ROWS), policy.replace(params=params)
            if sampling:
                arguments = (draw_key, batch.image, batch.text, of_sets(frozen, batch), settings)
                return now.rloo_loss(*arguments)
            gated = lambda tokens: task.losses(frozen, tokens, batch).mean()  # noqa: E731
            arguments = (draw_key, batch.image, batch.text, gated)
            return now.train_loss(*arguments, progress=sp.Progress(share))

        @jax.jit
        def update(params, moments, frozen, keys, number):
            key = jax.random.fold_in(keys, number)
            grads, _ = jax.grad(loss, has_aux=True)(params, frozen, key, (number - first) / count)
            step, moments = optimiser.update(grads, moments, params)
            return optax.apply_updates(params, step), moments

        params, moments = policy.params, optimiser.init(policy.params)
        keys = jax.random.key(seed + 1000)
        for number in range(first, last):
            params, moments = update(params, moments, frozen, keys, number)
        return policy.replace(params=params)

    for begin, end, sampling in ((0, first, False), (first, updates, True)):
        if begin < end:
            policy = stage(policy, begin, end, sampling)
    return policy, about


def found(task: Task, policy: sp.Policy) -> dict[str, float]:
    """Returns the share of questions of which all needed records are kept, and the first one."""
    test = task.draw(task.frozen, jax.random.key(98), 1024)
    kept = np.asarray(policy.prune(test.image, test.text, budget=2).index)
    there = (np.asarray(test.needed)[:, :, None] == kept[:, None]).any(-1)
    return {"all": float(there.all(1).mean()), "first": float(there[:, 0].mean())}


def share(text: str) -> float | str:
    """Reads the flag `--sampled`."""
    return text if text == "auto" else float(text)


def main(argv: list[str] | None = None) -> None:
    """Runs the command."""
    parser = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, nargs="+", default=[32])
    parser.add_argument("--hops", type=int, nargs="+", default=[1], choices=(1, 2))
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--updates", type=int, default=1000)
    help = "share of the updates, or auto"
    parser.add_argument("--sampled", type=share, default=0.0, help=help)
    parser.add_argument("--rows", nargs="+", help="methods; all by default")
    flags = parser.parse_args(argv)
    shape = {"feature_width": WIDTH, "text_width": HALF, "num_heads": 4, "draw": 0.0}
    rows = {
        "stepprune": sp.PolicyConfig(**shape),
        "one distribution": sp.PolicyConfig(**shape, group=max(flags.tokens)),  # no history
        "learned first query": sp.PolicyConfig(**shape, first_query="learned"),
        "small budgets at once": sp.PolicyConfig(**shape, budget_anneal=0.0),
        "autoselect": AutoSelectConfig(**shape),
    }
    for n, hops in itertools.product(flags.tokens, flags.hops):
        task = Task(world(), functools.partial(draw, n=n, hops=hops), losses)
        for name, seed in itertools.product(flags.rows or rows, flags.seeds):
            policy, how = train(task, rows[name], seed, flags.updates, flags.sampled)
            about = {"tokens": n, "hops": hops, "updates": flags.updates, "seed": seed}
            line = {"method": name} | about | how | found(task, policy)
            print(json.dumps(line), flush=True)


if __name__ == "__main__":
    exit_with("experiments.studies.records", main)
