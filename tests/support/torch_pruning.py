"""Pruning before the language model, on the torch model of `transformers`, prompt by prompt."""

from typing import NamedTuple

import numpy as np
import torch
from generation_reference import chosen, request
from plain_decoder import loop_assemble

from stepprune_jax.data.prompts import IMAGE_TOKEN


class Prompted(NamedTuple):
    """Embeddings [1, s, e] of a prompt, and the slots of each image's tokens."""

    embeddings: torch.Tensor
    spans: list[np.ndarray]


@torch.no_grad()
def prompted(pair, prompt, images, visual_fn, projected_fn=lambda tokens, tower, pixels: tokens):
    """Replaces the image tokens of a prompt by visual tokens.

    Args:
        pair: the models.
        prompt: a question.
        images: images of the question.
        visual_fn: maps the tower and pixels to tokens [k, d] before the projector.
        projected_fn: maps projected tokens [k, e], the tower and pixels to inserted tokens.
    """
    request_of_ours, core = request(pair.ours, prompt, images), pair.theirs.model
    table, parts, spans, length, num_images = core.get_input_embeddings(), [], [], 0, 0
    for token in request_of_ours.ids[0]:
        if token == IMAGE_TOKEN:
            normalised = pair.ours.backbone.normalise(request_of_ours.images.pixels)
            pixels = torch.tensor(normalised[request_of_ours.image_of[0][num_images]][None])
            tokens = visual_fn(core.vision_tower, pixels)
            projected = core.multi_modal_projector(tokens[None])[0]
            parts.append(projected_fn(projected, core.vision_tower, pixels))
            spans.append(np.arange(length, length + len(parts[-1])))
            num_images += 1
        else:
            parts.append(table(torch.tensor([token])))
        length += len(parts[-1])
    return Prompted(torch.cat(parts)[None], spans)


def all_patches(tower, pixels):
    """Returns the tokens that an unpruned model projects."""
    return tower(pixels, output_hidden_states=True).hidden_states[-2][0, 1:]


@torch.no_grad()
def tower_signals(tower, pixels):
    """Tokens [m, d] of the block that is projected, its class token's attention [h, m] and keys
    [m, c], in the mean over heads."""
    hidden, attention, key = _block_signals(tower, pixels, -2)
    return hidden.numpy(), attention[:, 0].numpy(), key.mean(0).numpy()


@torch.no_grad()
def received(tower, pixels, block):
    """Returns the attention [n] that patches receive in a block, averaged over heads and tokens."""
    return _block_signals(tower, pixels, block)[1].mean((0, 1))[1:].numpy()


def _block_signals(tower, pixels, block):
    """Returns output [m, d], attention [h, m, m] and keys [h, m, c] of a block."""
    model = getattr(tower, "vision_model", tower)
    states = tower(pixels, output_hidden_states=True).hidden_states
    layer = model.encoder.layers[block]
    attention_layer, normed = layer.self_attn, layer.layer_norm1(states[block - 1])[0]
    heads = (len(normed), attention_layer.num_heads, attention_layer.head_dim)
    query, key = (
        f(normed).view(heads).transpose(0, 1)
        for f in (attention_layer.q_proj, attention_layer.k_proj)
    )
    return states[block][0], (query @ key.transpose(1, 2) * attention_layer.scale).softmax(-1), key


@torch.no_grad()
def next_logits(pair, embeddings):
    """Returns logits [v] after a prompt at positions 0, 1, 2, ..."""
    hidden = pair.theirs.model.language_model(inputs_embeds=embeddings).last_hidden_state
    return pair.theirs.lm_head(hidden[0, -1]).numpy()


def check(pair, example, choose, projected=False):
    """Compares kept tokens and logits with the torch model.

    Args:
        pair: the models.
        example: our answer, with compact positions.
        choose: maps the tower and pixels to indices and tokens [k, d] before the projector; if
            `projected`, maps projected tokens, the tower and pixels to indices and tokens [k, e].
        projected: whether `choose` reads projected tokens.
    """
    indices = []

    def chosen(*arguments):
        index, tokens = choose(*arguments)
        indices.extend(index)
        return torch.as_tensor(tokens, dtype=torch.float32)

    functions = (all_patches, chosen) if projected else (chosen,)
    embeddings, _ = prompted(pair, example.prompt, example.images, *functions)
    np.testing.assert_array_equal(example.arrays["kept_0"], indices)
    np.testing.assert_array_equal(example.arrays["position_0"], np.arange(embeddings.shape[1]))
    np.testing.assert_allclose(example.arrays["logits"], next_logits(pair, embeddings), atol=1e-4)
    assert example.answer.kept == len(indices)


@torch.no_grad()
def pruned_answer(pair, prompt, images, positions, max_tokens):
    """Returns greedy ids after pruning with `ByQuestion`, computed without a cache."""
    ours, theirs = pair
    request_of_ours, core = request(ours, prompt, images), theirs.model
    n = ours.config.max_image_tokens
    kept = chosen(n, len(request_of_ours.question_ids[0]))
    tokens, place = loop_assemble(request_of_ours.ids[0], [kept] * len(images), n, positions)
    hidden, _ = prompted(pair, prompt, images, lambda *arguments: all_patches(*arguments)[kept])
    places, answer = [token[3] for token in tokens], []
    while len(answer) < max_tokens and theirs.generation_config.eos_token_id not in answer:
        # Without a mask, transformers reads gaps between positions as borders of sequences.
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
