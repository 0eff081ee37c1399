"""Operations up to the first token, by part."""

from small_world import one_shot, stepprune

from stepprune_jax.evaluation.operations import first_token_flops
from stepprune_jax.flops import llm_flops, policy_flops, vision_flops
from stepprune_jax.models.llava.config import LlavaConfig
from stepprune_jax.pruning import (
    Budget,
    FastV,
    GlimpsePrune,
    GlimpsePruneConfig,
    HoloV,
    make_method,
)
from stepprune_jax.pruning.method import NO_PRUNING
from stepprune_jax.testing import tiny_hf_config

CONFIG = LlavaConfig.from_hf(tiny_hf_config())
N = 9
VISION = vision_flops(CONFIG, [CONFIG.grid])


def parts(pruner, kept, text=20, words=5):
    return first_token_flops(CONFIG, pruner, CONFIG.grid, text, words, kept)


def prefill(tokens):
    return llm_flops(CONFIG.text, tokens).flops


def test_all_tokens_pass_through_tower_projector_and_language_model():
    assert parts(NO_PRUNING.pruner, N) == {
        "tower": VISION["tower"],
        "choice": 0,
        "projector": VISION["projector"],
        "prefill": prefill(20 + N),
    }


def test_what_is_dropped_in_front_of_the_projector_costs_nothing_behind_it():
    policy = stepprune()
    for budget, exact in ((Budget("count", 4), True), (Budget("own"), False)):
        pruner = make_method(None, budget, policy=policy).pruner
        found = parts(pruner, 4)
        assert found["choice"] == policy_flops(policy.config, N, 5, 4, exact=exact)["total"]
        assert found["projector"] == VISION["projector"] * 4 / N
        assert found["prefill"] == prefill(24)
    # A one-shot scorer takes no steps.
    scorer = one_shot()
    pruner = make_method(None, 4, policy=scorer).pruner
    encoder = policy_flops(scorer.config.shape, N, 5, 4)["encoder"]
    assert parts(pruner, 4)["choice"] == encoder


def test_what_is_dropped_later_has_cost_until_then():
    layers = CONFIG.text.num_layers
    found = parts(FastV(Budget("count", 4), layer=1), 4)
    assert found["projector"] == VISION["projector"]
    assert found["prefill"] == prefill([20 + N] + [24] * (layers - 1))
    assert parts(HoloV(Budget("count", 4)), 4)["projector"] == VISION["projector"]


def test_what_a_method_drops_later_by_itself_is_what_it_has_kept():
    config = GlimpsePruneConfig(selected_layers=(0,), reduce_layer=0)
    layers = CONFIG.text.num_layers
    for budget in (Budget("own"), Budget("count", 4)):
        found = parts(GlimpsePrune(budget, config=config), 4)
        assert found["prefill"] == prefill([20 + N] + [24] * (layers - 1))
        assert found["projector"] == VISION["projector"]
