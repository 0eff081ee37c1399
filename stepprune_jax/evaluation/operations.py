"""Operations (FLOPs) up to the first token of an answer, by formula."""

import functools

import numpy as np

from stepprune_jax.flops import llm_flops, policy_flops, vision_flops
from stepprune_jax.models.config import ModelConfig
from stepprune_jax.pruning import Pruner, TrainedMethod


@functools.lru_cache(1 << 14)  # questions are alike in their lengths
def first_token_flops(
    config: ModelConfig, pruner: Pruner, grid: tuple[int, int], text: int, words: int, kept: int
) -> dict[str, float | int]:
    """Counts the operations of one prompt with one image, up to the first token, by part.

    `words` of the `text` tokens are the user's. `kept` counts where the method decides; other
    budgets follow from the pruner. `choice` is 0 for methods without training.
    """
    n = int(config.family.num_tokens(config, np.array([grid]))[0])
    stops = not pruner.budget.is_exact
    visual = pruner.layer_tokens(config, n, kept if stops else None)
    projected = n if pruner.after_projector else visual[0]
    vision = vision_flops(config, [grid])
    choice = 0
    if isinstance(pruner, TrainedMethod) and pruner.shape is not None:
        steps = pruner.pointer_steps(kept)
        work = policy_flops(pruner.shape, n, words, steps or 0, exact=not stops)
        choice = work["encoder"] if steps is None else work["total"]
    return {
        "tower": vision["tower"],
        "choice": choice,
        "projector": vision["projector"] * projected / n,
        "prefill": llm_flops(config.text, [text + count for count in visual]).flops,
    }
