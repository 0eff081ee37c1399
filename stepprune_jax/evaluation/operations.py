"""Counts the floating-point operations (FLOPs) up to the first token of an answer."""

import functools

import numpy as np

from stepprune_jax.flops import llm_flops, policy_flops, query_key_flops, vision_flops
from stepprune_jax.models.backbone import Backbone
from stepprune_jax.pruning import Pruner
from stepprune_jax.selectors import Selector


@functools.lru_cache(1 << 14)  # thousands of questions have equal lengths and image sizes
def first_token_flops(
    backbone: Backbone,
    pruner: Pruner,
    grid: tuple[int, int],
    *,
    num_text_tokens: int,
    num_words: int,
    num_kept: int,
    num_patches: int = 1,
) -> dict[str, float | int]:
    """Counts the FLOPs of one prompt with one image or video, up to the answer's first token.

    Args:
        backbone: the model.
        pruner: the pruning method without its weights, `Pruner.without_weights`.
        grid: rows and columns of the image's tokens, or of a temporal patch of a video.
        num_text_tokens: number of text tokens of the prompt.
        num_words: number of text tokens that the user wrote, without the conversation template. A
            trained policy reads only these tokens.
        num_kept: number of kept visual tokens. Ignored if the budget is exact, because the budget
            then determines the number.
        num_patches: number of temporal patches of a video, which the tower encodes one by one; 1
            for an image.

    Returns:
        FLOPs by part: "tower", "choice", "projector" and "prefill". "choice" covers a trained
        policy, and the queries and keys that a method computes for pruning at a layer. Methods
        without weights have no "choice", although their scores take some FLOPs: less than half a
        percent of the FLOPs of LLaVA-7B.
    """
    config = backbone.config
    n = num_patches * int(backbone.num_tokens(np.array([grid]))[0])
    is_adaptive = not pruner.budget.is_exact
    # Number of visual tokens in each layer of the language model.
    layer_tokens = pruner.layer_tokens(config, n, num_kept if is_adaptive else None)
    num_projected = n if pruner.after_projector else layer_tokens[0]
    vision = vision_flops(backbone, [grid] * num_patches)
    # A method that prunes by attention before a layer computes queries and keys of its input.
    choice = sum(
        query_key_flops(config.text, num_text_tokens + layer_tokens[cut.layer - 1])
        for cut in pruner.cuts(config, n)
        if any(tap.kind in ("attention", "scores") and tap.layer == cut.layer for tap in cut.taps)
    )
    if isinstance(pruner, Selector) and pruner.encoder_config is not None:
        group = pruner.pointer_group
        policy_work = policy_flops(
            pruner.encoder_config, n, num_words, num_kept, exact=not is_adaptive, group=group
        )
        # A one-shot scorer has an encoder but no pointer decoder. Its `pointer_group` is None.
        choice += policy_work["encoder"] if group is None else policy_work["total"]
    return {
        "tower": vision["tower"],
        "choice": choice,
        "projector": vision["projector"] * num_projected / n,
        "prefill": llm_flops(
            config.text, [num_text_tokens + count for count in layer_tokens]
        ).flops,
    }
