"""A small transformer that reads the tokens of a grid and a question; a stand-in for a model."""

import functools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array, Bool, Float, Int

from experiments.grids.world import (
    KINDS,
    NUM_ANSWERS,
    NUM_WORDS,
    WIDTH,
    Grid,
    Questions,
    sample_questions,
)
from stepprune_jax.user_input import UserError

MODEL_WIDTH, NUM_HEADS, NUM_LAYERS = 64, 4, 3
Weights = dict[str, Any]


def init_reader(key: Array, grid: Grid) -> Weights:
    """Returns random weights of the projector, the word embeddings and the layers."""
    w, keys = MODEL_WIDTH, iter(jax.random.split(key, 6 + 4 * NUM_LAYERS))

    def dense(rows, columns):
        return jax.random.normal(next(keys), (rows, columns)) / rows**0.5

    layers = [
        {"qkv": dense(w, 3 * w), "out": dense(w, w) * 0.3, "up": dense(w, 4 * w)}
        | {"down": dense(4 * w, w) * 0.3}
        for _ in range(NUM_LAYERS)
    ]
    return {
        "projector": {"up": dense(WIDTH, 2 * w), "down": dense(2 * w, w)},
        "words": dense(grid.num_word_types, w) * grid.num_word_types**0.5 * 0.5,
        "end": dense(1, w) * 0.5,
        "layers": layers,
        "head": dense(w, NUM_ANSWERS),
        "order": dense(NUM_WORDS, w) * NUM_WORDS**0.5 * 0.5,
    }


def _norm(x: Array) -> Array:
    x = x - x.mean(-1, keepdims=True)
    return x * jax.lax.rsqrt(jnp.mean(x**2, -1, keepdims=True) + 1e-5)


def project(reader: Weights, tokens: Float[Array, "... d"]) -> Float[Array, "... w"]:
    """Maps visual tokens to the space of words."""
    x = (tokens - 3) / 3
    return jax.nn.gelu(x @ reader["projector"]["up"]) @ reader["projector"]["down"]


def embed_words(reader: Weights, words: Int[Array, "b l"]) -> Float[Array, "b l w"]:
    """Returns the embeddings of the words, without their order; zero in the padding."""
    return jnp.where((words >= 0)[..., None], reader["words"][words], 0)


def answer_logits(
    reader: Weights,
    projected: Float[Array, "b k w"],
    valid: Bool[Array, "b k"],
    words: Int[Array, "b l"],
) -> Float[Array, "b a"]:
    """Returns logits of the answers, from the valid projected tokens and the question.

    The order of the words tells which row and column name one cell.
    """
    b = projected.shape[0]
    end = jnp.broadcast_to(reader["end"], (b, 1, MODEL_WIDTH))
    ordered_words = embed_words(reader, words) + reader["order"]
    x = jnp.concatenate([projected, ordered_words, end], axis=1)
    mask = jnp.concatenate([valid, words >= 0, jnp.ones((b, 1), bool)], axis=1)
    for layer in reader["layers"]:
        heads = (_norm(x) @ layer["qkv"]).reshape(b, -1, 3, NUM_HEADS, MODEL_WIDTH // NUM_HEADS)
        query, key, value = heads[:, :, 0], heads[:, :, 1], heads[:, :, 2]
        read = jax.nn.dot_product_attention(query, key, value, mask=mask[:, None, None])
        x = x + read.reshape(b, -1, MODEL_WIDTH) @ layer["out"]
        x = x + jax.nn.gelu(_norm(x) @ layer["up"]) @ layer["down"]
    return _norm(x[:, -1]) @ reader["head"]


def answer_losses(
    reader: Weights, projected: Array, valid: Array, words: Array, answer: Array
) -> tuple[Float[Array, " b"], Bool[Array, " b"]]:
    """Returns the cross-entropy of each row's answer, and whether the best answer is right."""
    logits = answer_logits(reader, projected, valid, words)
    loss = optax.softmax_cross_entropy_with_integer_labels(logits, answer)
    return loss, jnp.argmax(logits, -1) == answer


def take_cells(key: Array, batch: Questions, num_cells: int) -> Questions:
    """Keeps the needed cells and random other cells, `num_cells` in all."""
    score = batch.needed + jax.random.uniform(key, batch.needed.shape)
    index = jnp.argsort(-score, axis=1)[:, :num_cells]
    return batch._replace(tokens=jnp.take_along_axis(batch.tokens, index[..., None], axis=1))


def train_reader(
    grid: Grid,
    kinds: tuple[str, ...],
    stages: Sequence[tuple[int, int, int]],
    *,
    seed: int = 0,
) -> Weights:
    """Trains a reader and prints its accuracy.

    Args:
        grid: size of the grids.
        kinds: kinds of questions.
        stages: (steps, cells, batch size) of each stage; 0 selects all cells. Attention is learned
            sooner from few cells; the last stage should have all cells.
        seed: seed of weights and questions.
    """
    num_steps = sum(steps for steps, _, _ in stages)
    schedule = optax.warmup_cosine_decay_schedule(0.0, 2e-3, num_steps // 20, num_steps, 1e-5)
    optimizer = optax.chain(
        optax.clip_by_global_norm(1.0), optax.adamw(schedule, weight_decay=0.01)
    )

    @functools.partial(jax.jit, static_argnums=(3, 4))
    def update(reader, moments, key, num_cells, batch_size):
        batch = sample_questions(key, grid, batch_size, kinds)
        batch = take_cells(jax.random.fold_in(key, 1), batch, num_cells)
        valid = jnp.ones(batch.tokens.shape[:2], bool)

        def loss_fn(reader):
            losses, is_right = answer_losses(
                reader, project(reader, batch.tokens), valid, batch.words, batch.answer
            )
            return losses.mean(), is_right.mean()

        (loss, accuracy), grads = jax.value_and_grad(loss_fn, has_aux=True)(reader)
        updates, moments = optimizer.update(grads, moments, reader)
        return optax.apply_updates(reader, updates), moments, loss, accuracy

    reader, step = init_reader(jax.random.key(seed), grid), 0
    moments = optimizer.init(reader)
    for num_stage_steps, stage_cells, batch_size in stages:
        num_cells = stage_cells or grid.num_tokens
        for _ in range(num_stage_steps):
            key = jax.random.fold_in(jax.random.key(seed + 1), step)
            reader, moments, loss, accuracy = update(reader, moments, key, num_cells, batch_size)
            if step % 200 == 0 or step == num_steps - 1:
                figures = f"loss {loss:.3f}, accuracy {100 * accuracy:.1f} %"
                print(f"reader {step}, {num_cells} cells: {figures}", flush=True)
            step += 1
    return reader


@functools.partial(jax.jit, static_argnums=(2,))
def _accuracy(reader: Weights, batch: Questions, keep: str) -> Array:
    kept = {"all": jnp.ones_like(batch.filled), "needed": batch.needed}[keep]
    kept = kept | (jnp.cumsum(kept, axis=1) == 0) & (jnp.arange(kept.shape[1]) == 0)
    return answer_losses(reader, project(reader, batch.tokens), kept, batch.words, batch.answer)[
        1
    ].mean()


def report_reader(reader: Weights, grid: Grid, kinds: tuple[str, ...] = KINDS) -> None:
    """Prints the accuracy of each kind of question with all tokens and with the needed tokens."""
    for kind in kinds:
        batch = sample_questions(jax.random.key(99), grid, 512, (kind,))
        figures = [
            f"{keep} {100 * _accuracy(reader, batch, keep):.1f} %" for keep in ("all", "needed")
        ]
        print(kind, *figures, flush=True)


def save_reader(reader: Weights, path: Path) -> None:
    """Writes the weights to a npz file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    np.savez(path, *jax.tree.leaves(reader))


def load_reader(path: Path, grid: Grid) -> Weights:
    """Reads the weights that `save_reader` wrote.

    Raises:
        UserError: the weights belong to another grid, or to other kinds of questions.
    """
    expected = jax.eval_shape(lambda: init_reader(jax.random.key(0), grid))
    with np.load(path) as arrays:
        leaves = [jnp.asarray(arrays[name]) for name in arrays.files]
    shapes = [leaf.shape for leaf in leaves]
    if shapes != [leaf.shape for leaf in jax.tree.leaves(expected)]:
        raise UserError(f"{path} has another vocabulary or width: delete it to train a new reader")
    return jax.tree.unflatten(jax.tree.structure(expected), leaves)
