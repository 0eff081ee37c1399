"""Counts of operations up to the first token."""

import pytest
from small_world import one_shot, stepprune

from stepprune_jax.evaluation.operations import first_token_flops
from stepprune_jax.flops import llm_flops, policy_flops, vision_flops
from stepprune_jax.models.llava import Llava
from stepprune_jax.pruning import Budget, FastV, HoloV
from stepprune_jax.registry import build_pruner
from stepprune_jax.selectors import GlimpsePrune, GlimpsePruneConfig
from stepprune_jax.testing import tiny_hf_config

BACKBONE = Llava.read(tiny_hf_config(), None)
CONFIG = BACKBONE.config
N = 9
VISION = vision_flops(BACKBONE, [CONFIG.grid])
GLIMPSE = GlimpsePruneConfig(selected_layers=(0,), reduce_layer=0)


def parts(pruner, num_kept, num_text_tokens=20, num_words=5):
    return first_token_flops(
        BACKBONE,
        pruner.without_weights,
        CONFIG.grid,
        num_text_tokens=num_text_tokens,
        num_words=num_words,
        num_kept=num_kept,
    )


def prefill(tokens):
    return llm_flops(CONFIG.text, tokens).flops


def test_tokens_dropped_before_the_projector_cost_nothing_after_it():
    policy, scorer = stepprune(), one_shot()
    for trained, budget, work in (
        (policy, Budget("count", 4), policy_flops(policy.config, N, 5, 4, exact=True)["total"]),
        (policy, Budget("adaptive"), policy_flops(policy.config, N, 5, 4, exact=False)["total"]),
        # A one-shot scorer takes no steps.
        (scorer, Budget("count", 4), policy_flops(scorer.encoder_config, N, 5, 4)["encoder"]),
    ):
        flops = parts(build_pruner(None, budget, policy=trained), 4)
        assert flops["choice"] == work and flops["prefill"] == prefill(24)
        assert flops["projector"] == VISION["projector"] * 4 / N


@pytest.mark.parametrize(
    "pruner",
    [
        FastV(Budget("count", 4), layer=1),
        GlimpsePrune(Budget("count", 4), config=GLIMPSE),
        GlimpsePrune(Budget("adaptive"), config=GLIMPSE),
    ],
)
def test_tokens_dropped_inside_the_model_cost_operations_in_earlier_layers(pruner):
    flops = parts(pruner, 4)
    assert (flops["tower"], flops["projector"]) == (VISION["tower"], VISION["projector"])
    assert flops["prefill"] == prefill([20 + N] + [24] * (CONFIG.text.num_layers - 1))
    assert parts(HoloV(Budget("count", 4)), 4)["projector"] == VISION["projector"]
