"""Operations (FLOPs) up to the first token of an answer, by formula."""

import functools

import numpy as np

from stepprune_jax.flops import llm_flops, policy_flops, vision_flops
from stepprune_jax.models.backbone import Backbone
from stepprune_jax.pruning import Pruner
from stepprune_jax.trained import Selector


@functools.lru_cache(1 << 14)  # questions are alike in their lengths
def first_token_flops(
    backbone: Backbone, pruner: Pruner, grid: tuple[int, int], text: int, words: int, kept: int
) -> dict[str, float | int]:
    """Counts the operations of one prompt with one image, up to the first token, by part.

    `words` of the `text` tokens are the user's. `kept` counts where the method decides; other
    budgets follow from the pruner, which is `Pruner.bare`. `choice` is 0 for methods without
    training.
    """
    config = backbone.config
    n = int(backbone.num_tokens(np.array([grid]))[0])
    stops = not pruner.budget.is_exact
    visual = pruner.layer_tokens(config, n, kept if stops else None)
    projected = n if pruner.after_projector else visual[0]
    vision = vision_flops(backbone, [grid])
    choice = 0
    if isinstance(pruner, Selector) and pruner.encoder_config is not None:
        steps = pruner.pointer_steps(kept)
        work = policy_flops(pruner.encoder_config, n, words, steps or 0, exact=not stops)
        choice = work["encoder"] if steps is None else work["total"]
    return {
        "tower": vision["tower"],
        "choice": choice,
        "projector": vision["projector"] * projected / n,
        "prefill": llm_flops(config.text, [text + count for count in visual]).flops,
    }
