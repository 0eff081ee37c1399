"""Pruning before the language model, on the torch model of `transformers`, prompt by prompt."""

from typing import NamedTuple

import numpy as np
import torch
from generation_reference import chosen, request
from plain_decoder import loop_assemble

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
            seen = pair.ours.backbone.normalise(asked.images.pixels)
            pixels = torch.tensor(seen[asked.image_of[0][shown]][None])
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


@torch.no_grad()
def tower_signals(tower, pixels):
    """Tokens [m, d] of the block that is projected, its class token's attention [h, m] and keys
    [m, c], in the mean over heads."""
    hidden, attention, key = _block_signals(tower, pixels, -2)
    return hidden.numpy(), attention[:, 0].numpy(), key.mean(0).numpy()


@torch.no_grad()
def received(tower, pixels, block):
    """The attention [n] that patches receive in a block from all tokens, in the mean over heads."""
    return _block_signals(tower, pixels, block)[1].mean((0, 1))[1:].numpy()


def _block_signals(tower, pixels, block):
    """Output [m, d], attention [h, m, m] and keys [h, m, c] of a block, counted from the last."""
    model = getattr(tower, "vision_model", tower)
    states = tower(pixels, output_hidden_states=True).hidden_states
    layer = model.encoder.layers[block]
    own, normed = layer.self_attn, layer.layer_norm1(states[block - 1])[0]
    heads = (len(normed), own.num_heads, own.head_dim)
    query, key = (f(normed).view(heads).transpose(0, 1) for f in (own.q_proj, own.k_proj))
    return states[block][0], (query @ key.transpose(1, 2) * own.scale).softmax(-1), key


@torch.no_grad()
def next_logits(pair, embeddings):
    """Logits [v] behind a prompt at positions 0, 1, 2, ..."""
    hidden = pair.theirs.model.language_model(inputs_embeds=embeddings).last_hidden_state
    return pair.theirs.lm_head(hidden[0, -1]).numpy()


def check(pair, asked, choose, projected=False):
    """Holds what is kept of a question's images, and the logits, against the torch model.

    Args:
        pair: the models.
        asked: our answer, with compact positions.
        choose: from the tower and pixels to indices and tokens [k, d] before the projector; if
            `projected`, from projected tokens, the tower and pixels to those to be put there.
        projected: where it chooses.
    """
    indices = []

    def chosen(*arguments):
        index, tokens = choose(*arguments)
        indices.extend(index)
        return torch.as_tensor(tokens, dtype=torch.float32)

    functions = (all_patches, chosen) if projected else (chosen,)
    embeddings, _ = prompted(pair, asked.prompt, asked.images, *functions)
    np.testing.assert_array_equal(asked.arrays["kept_0"], indices)
    np.testing.assert_array_equal(asked.arrays["position_0"], np.arange(embeddings.shape[1]))
    np.testing.assert_allclose(asked.arrays["logits"], next_logits(pair, embeddings), atol=1e-4)
    assert asked.answer.kept == len(indices)


@torch.no_grad()
def pruned_answer(pair, prompt, images, positions, max_tokens):
    """Greedy ids from what `ByQuestion` keeps, everything recomputed for each token."""
    ours, theirs = pair
    asked, n, core = request(ours, prompt, images), ours.config.max_image_tokens, theirs.model
    kept = chosen(n, len(asked.question_ids[0]))
    tokens, place = loop_assemble(asked.ids[0], [kept] * len(images), n, positions)
    hidden, _ = prompted(pair, prompt, images, lambda *seen: all_patches(*seen)[kept])
    places, answer = [token[3] for token in tokens], []
    while len(answer) < max_tokens and theirs.generation_config.eos_token_id not in answer:
        # Without a mask, gaps between positions would be taken for borders of sequences.
        states = core.language_model(
            inputs_embeds=hidden,
            position_ids=torch.tensor(places)[None],
            attention_mask=torch.ones(1, len(places)),
            use_cache=False,
        ).last_hidden_state
        answer.append(int(theirs.lm_head(states[0, -1]).argmax()))
        word = core.get_input_embeddings()(torch.tensor([[answer[-1]]]))
        hidden, places = torch.cat([hidden, word], dim=1), [*places, place + len(answer) - 1]
    return tuple(answer)
