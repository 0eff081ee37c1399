"""Operations (FLOPs) up to the first token of an answer, by formula."""

import functools

import numpy as np

from stepprune_jax.flops import llm_flops, policy_flops, query_key_flops, vision_flops
from stepprune_jax.models.backbone import Backbone
from stepprune_jax.pruning import Pruner
from stepprune_jax.selectors import Selector


@functools.lru_cache(1 << 14)  # many questions have the same lengths
def first_token_flops(
    backbone: Backbone, pruner: Pruner, grid: tuple[int, int], text: int, words: int, kept: int
) -> dict[str, float | int]:
    """Counts the operations of one prompt with one image, up to the first token, by part.

    Args:
        backbone: the model.
        pruner: the method without its weights, `Pruner.without_weights`. It determines the number
            of kept tokens if its budget is exact.
        grid: rows and columns of the image's tokens.
        text: number of text tokens of the prompt.
        words: number of text tokens that the user wrote.
        kept: number of kept tokens, read if the method decides it.

    Returns:
        The operations of "tower", "choice", "projector" and "prefill". "choice" has the operations
        of a trained policy, and of the queries and keys that a cut computes before its layer. The
        products of other methods are left out: they are less than half a percent of all operations
        of LLaVA-7B.
    """
    config = backbone.config
    n = int(backbone.num_tokens(np.array([grid]))[0])
    method_decides = not pruner.budget.is_exact
    visual = pruner.layer_tokens(config, n, kept if method_decides else None)
    projected = n if pruner.after_projector else visual[0]
    vision = vision_flops(backbone, [grid])
    choice = sum(
        query_key_flops(config.text, text + visual[cut.layer - 1])
        for cut in pruner.cuts(config, n)
        if any(tap.kind in ("attention", "scores") and tap.layer == cut.layer for tap in cut.taps)
    )
    if isinstance(pruner, Selector) and pruner.encoder_config is not None:
        group = pruner.pointer_group
        policy_work = policy_flops(
            pruner.encoder_config, n, words, kept, exact=not method_decides, group=group
        )
        choice += policy_work["encoder"] if group is None else policy_work["total"]
    return {
        "tower": vision["tower"],
        "choice": choice,
        "projector": vision["projector"] * projected / n,
        "prefill": llm_flops(config.text, [text + count for count in visual]).flops,
    }
