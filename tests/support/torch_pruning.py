"""Pruning on the torch model of `transformers`, one prompt at a time."""

from typing import NamedTuple

import numpy as np
import torch
import transformers
from generation_reference import request
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb, repeat_kv

from stepprune_jax.models.vlm import IMAGE_TOKEN


class Prompted(NamedTuple):
    """Embeddings of a prompt [1, s, e], and the slots of each image's tokens."""

    embeddings: torch.Tensor
    spans: list[np.ndarray]


@torch.no_grad()
def prompted(pair, prompt, images, visual_fn, projected_fn=lambda tokens, tower, pixels: tokens):
    """Puts visual tokens in the places of the images.

    Args:
        pair: the models.
        prompt: a question.
        images: of the question.
        visual_fn: from the tower and pixels to tokens [k, d] before the projector.
        projected_fn: from projected tokens [k, e], the tower and pixels to those to be put there.
    """
    asked, core = request(pair.ours, prompt, images), pair.theirs.model
    table, parts, spans, length, shown = core.get_input_embeddings(), [], [], 0, 0
    for token in asked.ids[0]:
        if token == IMAGE_TOKEN:
            pixels = torch.tensor(asked.pixels[asked.image_of[0][shown]][None])
            tokens = visual_fn(core.vision_tower, pixels)
            projected = core.multi_modal_projector(tokens[None])[0]
            parts.append(projected_fn(projected, core.vision_tower, pixels))
            spans.append(np.arange(length, length + len(parts[-1])))
            shown += 1
        else:
            parts.append(table(torch.tensor([token])))
        length += len(parts[-1])
    return Prompted(torch.cat(parts)[None], spans)


def all_patches(tower, pixels):
    """The tokens that an unpruned model projects."""
    return tower(pixels, output_hidden_states=True).hidden_states[-2][0, 1:]


class Boundary(NamedTuple):
    """What is known between two layers of the language model.

    Attributes:
        core: the language model.
        block: the last layer run.
        before: [1, s, e] what went into it.
        angles: of the rotary positions.
        after: [1, s, e] what came out.
        spans: the slots of each image's tokens.
    """

    core: torch.nn.Module
    block: torch.nn.Module
    before: torch.Tensor
    angles: tuple[torch.Tensor, torch.Tensor]
    after: torch.Tensor
    spans: list[np.ndarray]


@torch.no_grad()
def dropped_between(pair, prompt, images, layer, choose_fn, max_tokens):
    """Drops visual tokens before a layer, once in the prefill; it and later ones cache the rest.

    Args:
        pair: the models.
        prompt: a question.
        images: of the question.
        layer: the layer.
        choose_fn: from a `Boundary` to the slots of each image that stay, ascending.
        max_tokens: steps.

    Returns:
        Indices of each image's kept tokens, logits [max_tokens, v] of each step, and greedy ids.
    """
    model, core = pair.theirs, pair.theirs.model.language_model
    hidden, spans = prompted(pair, prompt, images, all_patches)
    cache, position = transformers.DynamicCache(), torch.arange(hidden.shape[1])[None]
    following, passed, kept, logits = hidden.shape[1], None, None, []
    while True:
        for number, block in enumerate(core.layers):
            if number == layer and kept is None:
                kept = choose_fn(Boundary(core, *passed, hidden, spans))
                text = np.setdiff1d(np.arange(hidden.shape[1]), np.concatenate([[], *spans]))
                stay = np.sort(np.concatenate([text, *kept])).astype(int)
                hidden, position = hidden[:, stay], position[:, stay]
            angles = core.rotary_emb(hidden, position)
            passed = block, hidden, angles
            hidden = block(hidden, past_key_values=cache, position_embeddings=angles)
        logits.append(model.lm_head(core.norm(hidden[:, -1]))[0])
        if len(logits) == max_tokens:
            break
        hidden = core.embed_tokens(logits[-1].argmax()[None, None])
        position = torch.tensor([[following]])
        following += 1
    logits = torch.stack(logits).numpy()
    inside = [own - span[0] for own, span in zip(kept, spans, strict=True)]
    return inside, logits, logits.argmax(1)


def queries_and_keys(boundary):
    """Of the last layer run, after rotary positions: [1, h, s, c] each, keys repeated."""
    own, before = boundary.block.self_attn, boundary.before
    normed, heads = boundary.block.input_layernorm(before), (1, before.shape[1], -1, own.head_dim)
    query, key = (f(normed).view(heads).transpose(1, 2) for f in (own.q_proj, own.k_proj))
    query, key = apply_rotary_pos_emb(query, key, *boundary.angles)
    return query, repeat_kv(key, own.num_key_value_groups)


def fastv(pair, prompt, images, layer, count, max_tokens):
    """FastV; what is returned is that of `dropped_between`."""

    def most_attended(boundary):
        query, key = queries_and_keys(boundary)
        scores = query[:, :, -1:] @ key.transpose(2, 3) * query.shape[3] ** -0.5
        received = scores.softmax(-1)[0, :, 0].mean(0).numpy()
        return [span[np.sort(best(received[span], count))] for span in boundary.spans]

    return dropped_between(pair, prompt, images, layer, most_attended, max_tokens)


def best(scores, count):
    """Indices of the best, best first, ties to the earlier one."""
    return np.argsort(-scores, kind="stable")[:count]


@torch.no_grad()
def tower_signals(tower, pixels):
    """Tokens [m, d] of the block that is projected, its class token's attention [h, m] and keys
    [m, c], in the mean over heads."""
    layers = (
        tower.vision_model.encoder.layers
        if hasattr(tower, "vision_model")
        else (tower.encoder.layers)
    )
    states = tower(pixels, output_hidden_states=True).hidden_states
    block = layers[len(layers) - 2]
    own, normed = block.self_attn, block.layer_norm1(states[-3])[0]
    heads = (len(normed), own.num_heads, own.head_dim)
    query, key = (f(normed).view(heads).transpose(0, 1) for f in (own.q_proj, own.k_proj))
    attention = (query[:, :1] @ key.transpose(1, 2) * own.scale).softmax(-1)[:, 0]
    return states[-2][0].numpy(), attention.numpy(), key.mean(0).numpy()


@torch.no_grad()
def next_logits(pair, embeddings):
    """Logits [v] behind a prompt at positions 0, 1, 2, ..."""
    hidden = pair.theirs.model.language_model(inputs_embeds=embeddings).last_hidden_state
    return pair.theirs.lm_head(hidden[0, -1]).numpy()
