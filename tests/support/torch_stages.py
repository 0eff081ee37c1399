"""Methods that prune between layers, on the torch model of `transformers`, one prompt at a time."""

from typing import NamedTuple

import numpy as np
import torch
import transformers
from torch_pruning import all_patches, prompted
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb, repeat_kv


class Row(NamedTuple):
    """What enters a layer: states [1, s, e], position ids [1, s], images and indices [s].

    The image is -1 for text; the index in it is -1 for text and merged tokens.
    """

    hidden: torch.Tensor
    position: torch.Tensor
    image: np.ndarray
    index: np.ndarray

    def take(self, slots):
        """Some of the slots."""
        slots = np.asarray(slots, int)
        return Row(
            self.hidden[:, slots], self.position[:, slots], self.image[slots], self.index[slots]
        )

    def span(self, image):
        """The slots of an image."""
        return np.flatnonzero(self.image == image)

    def dropping(self, kept):
        """The text and, of the visual tokens, those in the given slots of each image."""
        kept = np.concatenate([np.zeros(0, int), *kept])
        return self.take(np.sort(np.concatenate([np.flatnonzero(self.image < 0), kept])))

    def inserting(self, image, tokens):
        """Merged tokens [c, e] behind those of an image, at the last one's position ids."""
        at, c = self.span(image)[-1] + 1, len(tokens)
        hidden = torch.tensor(tokens, dtype=self.hidden.dtype)[None]
        position = self.position[:, at - 1 : at].repeat(1, c)
        return Row(
            torch.cat([self.hidden[:, :at], hidden, self.hidden[:, at:]], dim=1),
            torch.cat([self.position[:, :at], position, self.position[:, at:]], dim=1),
            np.insert(self.image, at, [image] * c),
            np.insert(self.index, at, [-1] * c),
        )


@torch.no_grad()
def check(pair, asked, drops, renumber=False, forgets=False):
    """Holds our answer against a greedy one that prunes once, in the prefill.

    Every layer caches what entered it, unless it forgets. Returns the rows of each stage.

    Args:
        pair: both models.
        asked: our answer.
        drops: for some layers what they leave: a function of (language model, the rows that entered
            each layer up to this one) that returns the row which enters in place of the last.
        renumber: whether tokens are numbered anew behind each cut.
        forgets: whether dropped tokens leave the caches of all layers before.
    """
    model, core = pair.theirs, pair.theirs.model.language_model
    max_tokens = len(asked.answer.token_ids)
    hidden, spans = prompted(pair, asked.prompt, asked.images, all_patches)
    s = hidden.shape[1]
    image, index = np.full(s, -1), np.full(s, -1)
    for number, span in enumerate(spans):
        image[span], index[span] = number, np.arange(len(span))
    row = Row(hidden, torch.arange(s)[None], image, index)
    cache, rows, entered, following, logits = transformers.DynamicCache(), [row], [], [], []
    for number, block in enumerate(core.layers):
        if number in drops:
            before, row = row, drops[number](core, [*entered, row])
            if forgets:
                named = {*zip(row.image, row.index, strict=True)}
                old = zip(before.image, before.index, strict=True)
                left = [at for at, one in enumerate(old) if one in named]  # all of the text is -1
                for layer in cache.layers:
                    layer.keys, layer.values = layer.keys[:, :, left], layer.values[:, :, left]
            if renumber:
                row = row._replace(position=torch.arange(row.hidden.shape[1])[None])
            rows.append(row)
        entered.append(row)
        following.append(row.hidden.shape[1] if renumber else s)
        row = row._replace(hidden=_run(core, block, row.hidden, row.position, cache))
    hidden = row.hidden
    while True:
        logits.append(model.lm_head(core.norm(hidden[:, -1]))[0])
        if len(logits) == max_tokens:
            break
        hidden = core.embed_tokens(logits[-1].argmax()[None, None])
        for number, block in enumerate(core.layers):
            position = torch.tensor([[following[number] + len(logits) - 1]])
            hidden = _run(core, block, hidden, position, cache)
    logits, arrays = torch.stack(logits).numpy(), asked.arrays
    for stage, row in enumerate(rows):
        visual = row.image >= 0
        np.testing.assert_array_equal(arrays[f"kept_{stage}"], row.index[visual])
        np.testing.assert_array_equal(arrays[f"image_{stage}"], row.image[visual])
        np.testing.assert_array_equal(arrays[f"position_{stage}"], row.position[0])
    np.testing.assert_allclose(arrays["logits"], logits[0], atol=1e-4)
    assert asked.answer.token_ids == tuple(logits.argmax(1))
    assert asked.answer.kept == (rows[-1].image >= 0).sum()
    return rows


def _run(core, block, hidden, position, cache):
    """A layer over a row, or over one token behind what it has cached."""
    angles = core.rotary_emb(hidden, position)
    # By position: transformers 5.24 renamed the cache's argument.
    return block(hidden, None, None, cache, position_embeddings=angles)


def queries_and_keys(core, number, row):
    """Of a layer for the row that enters it, after rotary positions: [h, s, c], keys repeated."""
    own, block = core.layers[number].self_attn, core.layers[number]
    normed, heads = block.input_layernorm(row.hidden), (1, row.hidden.shape[1], -1, own.head_dim)
    query, key = (f(normed).view(heads).transpose(1, 2) for f in (own.q_proj, own.k_proj))
    query, key = apply_rotary_pos_emb(query, key, *core.rotary_emb(row.hidden, row.position))
    return query[0], repeat_kv(key, own.num_key_value_groups)[0]


def attention(core, number, row, slots):
    """Softmax attention [h, q, s] of a layer from some slots of the row that enters it."""
    query, key = queries_and_keys(core, number, row)
    s = query.shape[1]
    slots = np.arange(s)[slots]
    scores = query[:, slots] @ key.transpose(1, 2) * query.shape[2] ** -0.5
    later = torch.arange(s) > torch.tensor(slots)[:, None]
    return scores.masked_fill(later, -torch.inf).softmax(-1).numpy()


def best(scores, count):
    """Indices of the highest scores, in descending order; the first of equal ones."""
    return np.argsort(-np.asarray(scores), kind="stable")[:count]


def keeping_best(scores, row, counts):
    """The row with the best of each image's tokens, by scores [s]; a count for each image."""
    spans = [row.span(image) for image in range(len(counts))]
    return row.dropping(
        [
            span[np.sort(best(scores[span], count))]
            for span, count in zip(spans, counts, strict=True)
        ]
    )
