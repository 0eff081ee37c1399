"""Trains policies on a task of two tokens in any order, by each recipe and by "auto".

    python -m experiments.studies.pairs --seeds 0 1 --sampled 0 1 auto

The question names two kinds of shapes of a scene of `experiments.shapes`: have they the same
colour? Both shapes are needed, and the question names both. An image is the kind and the colour of
each of 36 patches, in random directions and with noise; the kinds named are there once, and half of
the answers are yes. A frozen reader looks up both kinds and compares the colours that it finds.
Printed are the shares of 2,048 right answers from two and from four kept tokens, from all, and from
random ones.
"""

import argparse
import itertools
import json
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

import stepprune_jax as sp
from experiments.shapes import scene_at
from experiments.shapes.draw import patch_labels
from experiments.shapes.questions import sole
from experiments.shapes.scene import COLORS, SHAPES
from experiments.studies.records import HALF, Task, directions, share, train
from stepprune_jax.cli.command_line import Parser, exit_with

GRID, SCENES = 6, 6000


class Batch(NamedTuple):
    """Questions: tokens [b, n, d], embeddings of two kinds [b, 2, e], whether the answer is yes."""

    image: jax.Array
    text: jax.Array
    answer: jax.Array


def world() -> dict[str, jax.Array]:
    """Returns embeddings of kinds and colours, and the patches and kinds of all questions."""
    kinds, colors, asked, answers = [], [], [], []
    for number in range(SCENES):
        scene, _ = scene_at(0, "train", number, GRID)
        labels = patch_labels(scene, GRID)
        of = {shape.kind: shape.color for shape in sole(scene, lambda shape: shape.kind)}
        seen = [kind for kind in of if (labels["class_kind"] == SHAPES.index(kind) + 1).any()]
        for pair in itertools.combinations(seen, 2):
            kinds.append(labels["class_kind"])
            colors.append(labels["class_color"])
            asked.append([SHAPES.index(kind) + 1 for kind in pair])
            answers.append(of[pair[0]] == of[pair[1]])
    answer, rows = np.array(answers), []
    for value in (True, False):  # as many of either
        rows.append(np.flatnonzero(answer == value)[: min(answer.sum(), (~answer).sum())])
    order = np.random.default_rng(0).permutation(np.concatenate(rows))
    parts = {"kinds": kinds, "colors": colors, "asked": asked, "answer": answers}
    chosen = {name: jnp.asarray(np.array(part)[order]) for name, part in parts.items()}
    return chosen | {
        "kind": directions(0, len(SHAPES) + 2),
        "color": directions(1, len(COLORS) + 1),
        "ground": directions(2, GRID**2),
    }


def draw(frozen: dict[str, jax.Array], key: jax.Array, rows: int, test: bool = False) -> Batch:
    """Draws questions, those for the test from the last quarter."""
    keys, most = jax.random.split(key), len(frozen["answer"])
    first, last = (3 * most // 4, most) if test else (0, 3 * most // 4)
    at = jax.random.randint(keys[0], (rows,), first, last)
    place = jnp.broadcast_to(frozen["ground"], (rows, GRID**2, HALF))
    parts = frozen["kind"][frozen["kinds"][at]], frozen["color"][frozen["colors"][at]], place
    tokens = jnp.concatenate(parts, axis=2)
    image = 7 + 3 * (tokens + 0.1 * jax.random.normal(keys[1], tokens.shape))
    return Batch(image, frozen["kind"][frozen["asked"][at]], frozen["answer"][at])


def losses(frozen, tokens, batch: Batch, valid=True) -> jax.Array:
    """Computes each row's cross-entropy of a reader that compares two colours."""
    del frozen
    kind, color, _ = jnp.split((tokens - 7) / 3, 3, axis=-1)
    match = jnp.einsum("bnd,bqd->bqn", kind, batch.text) * (12 / HALF)
    valid = jnp.broadcast_to(valid, tokens.shape[:2])[:, None]
    attention = jax.nn.softmax(jnp.where(valid, match, -1e9), axis=2)
    one, two = jnp.moveaxis(jnp.einsum("bqn,bnd->bqd", attention, color), 1, 0)
    logit = 8 * (jnp.sum(one * two, axis=1) / HALF - 0.5)
    return jnp.logaddexp(0, jnp.where(batch.answer, -logit, logit))


def right(task: Task, policy: sp.Policy) -> dict[str, float]:
    """Returns the shares of right answers, in percent, from a policy's tokens and others."""
    test = draw(task.frozen, jax.random.key(98), 2048, test=True)

    def share(tokens, valid=True):
        loss = task.losses(task.frozen, tokens, test, valid)
        return round(100 * float(jnp.mean(loss < jnp.log(2))), 1)

    result = {"all": share(test.image)}
    for budget in (2, 4):
        kept = policy.prune(test.image, test.text, budget=budget)
        result[f"policy, {budget}"] = share(kept.tokens, kept.valid)
        order = jax.random.uniform(jax.random.key(97), test.image.shape[:2]).argsort(axis=1)
        anyhow = jnp.take_along_axis(test.image, order[:, :budget, None], axis=1)
        result[f"random, {budget}"] = share(anyhow)
    return result


def main(argv: list[str] | None = None) -> None:
    """Runs the command."""
    parser = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--updates", type=int, default=500)
    help = "shares of the updates on sampled sets, or auto"
    parser.add_argument("--sampled", type=share, nargs="+", default=["auto"], help=help)
    flags = parser.parse_args(argv)
    shape = {"feature_width": 3 * HALF, "text_width": HALF, "num_heads": 4, "draw": 0.0}
    task, config = Task(world(), draw, losses), sp.PolicyConfig(**shape)
    for sampled, seed in itertools.product(flags.sampled, flags.seeds):
        policy, how = train(task, config, seed, flags.updates, sampled)
        about = {"recipe": sampled, "updates": flags.updates, "seed": seed}
        print(json.dumps(about | how | right(task, policy)), flush=True)


if __name__ == "__main__":
    exit_with("experiments.studies.pairs", main)
