"""A batch with all kinds of pruned prefixes, and the same rows, one by one, in torch."""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import torch
from hf_reference import NUM_PATCHES, TEXT, VISION, as_torch, normal
from plain_decoder import loop_assemble
from visual import visual_of

from stepprune_jax.data.prompts import IMAGE_TOKEN
from stepprune_jax.models import assembly
from stepprune_jax.models.llava import Llava, LlavaConfig
from stepprune_jax.models.sequence import Kept

S = IMAGE_TOKEN
CONFIG = LlavaConfig.from_hf({"model_type": "llava", "vision_config": VISION, "text_config": TEXT})
# Rows of ids: two images between text, one image, images at both ends, only text, and an image
# without kept tokens.
ROWS = [
    [1, 7, S, 8, 9, S, 10],
    [1, S, 5, 6],
    [S, 3, 4, 2, S],
    [1, 20, 21, 22, 23, 24, 25, 26],
    [1, S, 30],
]
KEPT = [[[0, 3, 5, 15], [2]], [[1, 2, 4, 8, 9, 14], []], [[6], [7, 12]], [[], []], [[], []]]


# Without `jax.jit`, each of the many small operations would be compiled separately.
@functools.partial(jax.jit, static_argnames=("config", "positions", "capacity"))
def assemble(params, config, *batch, positions="original", capacity=None):
    backbone = Llava(config)
    return assembly.assemble(params, backbone, *batch, positions=positions, capacity=capacity)


class Batch(NamedTuple):
    ids: jax.Array
    text_length: jax.Array
    visual: Kept
    grid: jax.Array


def batch(noise=0.0):
    """Pads the rows to two images with eight slots each; the padding contains noise."""
    slots = (len(ROWS), 2, 8)
    ids = np.full((len(ROWS), max(map(len, ROWS))), 42)
    valid, index = np.zeros(slots, bool), np.full(slots, 11)
    visual = noise * np.asarray(normal(99, *slots, 64))
    for row, row_ids in enumerate(ROWS):
        ids[row, : len(row_ids)] = row_ids
        for image, kept in enumerate(KEPT[row]):
            valid[row, image, : len(kept)] = True
            index[row, image, : len(kept)] = kept
            visual[row, image, : len(kept)] = np.asarray(image_tokens(row, image))[kept]
    lengths = jnp.array(list(map(len, ROWS)), jnp.int32)
    tokens, valid, index = map(jnp.asarray, (visual, valid, index))
    return Batch(jnp.asarray(ids), lengths, *visual_of(CONFIG, tokens, index, valid))


def image_tokens(row, image):
    """Returns all projected tokens of an image."""
    return normal(100 + 10 * row + image, NUM_PATCHES, 64)


def by_hand(model, row, positions, answer=()):
    """Returns embeddings, position ids and the next position of a row, from a loop over tokens."""
    ids = [*ROWS[row], *answer]
    tokens, next_position = loop_assemble(ids, KEPT[row], NUM_PATCHES, positions)
    table = model.get_input_embeddings()
    embeddings = [
        table(torch.tensor(token)) if image < 0 else as_torch(image_tokens(row, image))[index]
        for token, image, index, _ in tokens
    ]
    return (
        torch.stack(embeddings)[None],
        torch.tensor([token[3] for token in tokens])[None],
        next_position,
    )


def torch_logits(model, row, positions, answer=()):
    embeddings, ids, _ = by_hand(model, row, positions, answer)
    return model(inputs_embeds=embeddings, position_ids=ids).logits[0]
