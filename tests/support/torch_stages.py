"""Runs methods that prune between layers on the torch model of `transformers`, row by row."""

from typing import NamedTuple

import numpy as np
import torch
import transformers
from torch_pruning import all_patches, prompted
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb, repeat_kv


class Row(NamedTuple):
    """Inputs of a layer for one prompt.

    Attributes:
        hidden: [1, s, e] residual stream.
        position: [1, s] position ids.
        image: [s] number of each token's image; -1 for text.
        index: [s] index of each token in its image; -1 for text and merged tokens.
    """

    hidden: torch.Tensor
    position: torch.Tensor
    image: np.ndarray
    index: np.ndarray

    def take(self, slots):
        """Returns the row with only the given slots."""
        slots = np.asarray(slots, int)
        return Row(
            self.hidden[:, slots], self.position[:, slots], self.image[slots], self.index[slots]
        )

    def span(self, image):
        """Returns the slots of an image."""
        return np.flatnonzero(self.image == image)

    def dropping(self, kept):
        """Returns the row with all text and only the visual tokens in the given slots per image."""
        kept = np.concatenate([np.zeros(0, int), *kept])
        return self.take(np.sort(np.concatenate([np.flatnonzero(self.image < 0), kept])))

    def inserting(self, image, tokens):
        """Returns the row with merged tokens [c, e] after an image, at its last position id."""
        slot, count = self.span(image)[-1] + 1, len(tokens)
        hidden = torch.tensor(tokens, dtype=self.hidden.dtype)[None]
        position = self.position[:, slot - 1 : slot].repeat(1, count)
        return Row(
            torch.cat([self.hidden[:, :slot], hidden, self.hidden[:, slot:]], dim=1),
            torch.cat([self.position[:, :slot], position, self.position[:, slot:]], dim=1),
            np.insert(self.image, slot, [image] * count),
            np.insert(self.index, slot, [-1] * count),
        )


@torch.no_grad()
def check(pair, traced_answer, drops, renumber=False, prunes_cache=False):
    """Compares our answer with the torch model's greedy answer that prunes during the prefill.

    Args:
        pair: both models.
        traced_answer: our answer, with its prompt, images and trace.
        drops: functions by layer. A function maps (language model, inputs of all layers so far and
            of this layer) to the pruned inputs of this layer.
        renumber: whether tokens get consecutive position ids after each cut.
        prunes_cache: whether dropped tokens are also removed from the KV caches of earlier layers.

    Returns:
        The rows of each stage.
    """
    model, core = pair.theirs, pair.theirs.model.language_model
    max_tokens = len(traced_answer.answer.token_ids)
    hidden, spans = prompted(pair, traced_answer.prompt, traced_answer.images, all_patches)
    s = hidden.shape[1]
    image, index = np.full(s, -1), np.full(s, -1)
    for number, span in enumerate(spans):
        image[span], index[span] = number, np.arange(len(span))
    row = Row(hidden, torch.arange(s)[None], image, index)
    cache, rows, entered, next_positions, logits = transformers.DynamicCache(), [row], [], [], []
    for number, block in enumerate(core.layers):
        if number in drops:
            previous, row = row, drops[number](core, [*entered, row])
            if prunes_cache:
                kept_tokens = {*zip(row.image, row.index, strict=True)}
                previous_tokens = zip(previous.image, previous.index, strict=True)
                # All text tokens are (-1, -1).
                kept_slots = [
                    slot for slot, token in enumerate(previous_tokens) if token in kept_tokens
                ]
                for layer in cache.layers:
                    layer.keys = layer.keys[:, :, kept_slots]
                    layer.values = layer.values[:, :, kept_slots]
            if renumber:
                row = row._replace(position=torch.arange(row.hidden.shape[1])[None])
            rows.append(row)
        entered.append(row)
        next_positions.append(row.hidden.shape[1] if renumber else s)
        row = row._replace(hidden=_run(core, block, row.hidden, row.position, cache))
    hidden = row.hidden
    while True:
        logits.append(model.lm_head(core.norm(hidden[:, -1]))[0])
        if len(logits) == max_tokens:
            break
        hidden = core.embed_tokens(logits[-1].argmax()[None, None])
        for number, block in enumerate(core.layers):
            position = torch.tensor([[next_positions[number] + len(logits) - 1]])
            hidden = _run(core, block, hidden, position, cache)
    logits, arrays = torch.stack(logits).numpy(), traced_answer.arrays
    for stage, row in enumerate(rows):
        visual = row.image >= 0
        np.testing.assert_array_equal(arrays[f"kept_{stage}"], row.index[visual])
        np.testing.assert_array_equal(arrays[f"image_{stage}"], row.image[visual])
        np.testing.assert_array_equal(arrays[f"position_{stage}"], row.position[0])
    np.testing.assert_allclose(arrays["logits"], logits[0], atol=1e-4)
    assert traced_answer.answer.token_ids == tuple(logits.argmax(1))
    assert traced_answer.answer.kept == (rows[-1].image >= 0).sum()
    return rows


def _run(core, block, hidden, position, cache):
    """Runs a layer over a row, or over one new token with the KV cache."""
    angles = core.rotary_emb(hidden, position)
    # The cache is passed by position, because transformers 5.24 renamed this argument.
    return block(hidden, None, None, cache, position_embeddings=angles)


def queries_and_keys(core, number, row):
    """Computes a layer's queries and repeated keys [h, s, c] after rotary positions."""
    attention, block = core.layers[number].self_attn, core.layers[number]
    normed = block.input_layernorm(row.hidden)
    shape = 1, row.hidden.shape[1], -1, attention.head_dim
    query, key = (
        projection(normed).view(shape).transpose(1, 2)
        for projection in (attention.q_proj, attention.k_proj)
    )
    query, key = apply_rotary_pos_emb(query, key, *core.rotary_emb(row.hidden, row.position))
    return query[0], repeat_kv(key, attention.num_key_value_groups)[0]


def attention(core, number, row, slots):
    """Computes a layer's softmax attention [h, q, s] from some slots of its input row."""
    query, key = queries_and_keys(core, number, row)
    s = query.shape[1]
    slots = np.arange(s)[slots]
    scores = query[:, slots] @ key.transpose(1, 2) * query.shape[2] ** -0.5
    is_later = torch.arange(s) > torch.tensor(slots)[:, None]
    return scores.masked_fill(is_later, -torch.inf).softmax(-1).numpy()


def best(scores, count):
    """Returns the indices of the highest scores in descending order; ties go to lower indices."""
    return np.argsort(-np.asarray(scores), kind="stable")[:count]


def keeping_best(scores, row, counts):
    """Returns the row with the `counts` best tokens of each image, by scores [s]."""
    spans = [row.span(image) for image in range(len(counts))]
    return row.dropping(
        [
            span[np.sort(best(scores[span], count))]
            for span, count in zip(spans, counts, strict=True)
        ]
    )
