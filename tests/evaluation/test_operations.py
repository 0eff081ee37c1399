"""Operations of table rows: their parts, their mean over questions, and where they are unknown."""

from pathlib import Path

import numpy as np
import pytest
from small_world import one_shot, stepprune, tiny_model

from stepprune_jax.benchmarks.answer_files import AnswerFile, Provenance
from stepprune_jax.checkpoints.policy import save_policy
from stepprune_jax.evaluation.operations import (
    Lengths,
    first_token_flops,
    mean_flops,
    prompt_lengths,
    pruner_of,
    row_policies,
)
from stepprune_jax.evaluation.rows import policy_digest
from stepprune_jax.evaluation.settings import EvalSettings
from stepprune_jax.flops import llm_flops, policy_flops, vision_flops
from stepprune_jax.models.llava.config import LlavaConfig
from stepprune_jax.pruning import (
    Budget,
    FastV,
    GlimpsePrune,
    GlimpsePruneConfig,
    HoloV,
    StepPrune,
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


def test_the_mean_is_over_questions():
    pruner = make_method(None, Budget("own"), policy=stepprune()).pruner
    lengths = Lengths(np.array([20, 20, 30]), np.array([5, 5, 6]))
    each = [sum(parts(pruner, *a).values()) for a in ((2, 20, 5), (4, 20, 5), (4, 30, 6))]
    grids = np.tile(CONFIG.grid, (3, 1))
    found = mean_flops(CONFIG, pruner, lengths, np.array([2, 4, 4]), grids)
    assert found == pytest.approx(sum(each) / 3)


def test_prompts_are_as_long_as_the_model_reads_them(tmp_path):
    model = tiny_model(tmp_path)
    lengths = prompt_lengths(model.tokenizer, model.config, ["red", "What is this?"])
    assert (lengths.words < lengths.text).all() and lengths.text[0] < lengths.text[1]
    conversation = model.config.family.conversation(["<image>\nred"])
    pieces = [model.tokenizer(piece).input_ids for piece in conversation.split("<image>")]
    assert lengths.text[0] == len(pieces[0]) + len(pieces[1]) - 1  # one start token
    assert lengths.words[0] == len(model.tokenizer("red", add_special_tokens=False).input_ids)


def card(method, mode="exact", budget=4, **made):
    bias = 0.5 if mode == "adaptive" else None
    provenance = Provenance("folder", "q", 3, method, mode, budget, N, bias, "model", made)
    return AnswerFile.of(Path("answers"), provenance)


def test_a_provenance_says_which_pruner_answered():
    found = pruner_of(card("FastV", layer=1, average=False).provenance, None)
    assert found == FastV(Budget("count", 4), layer=1, average=False)
    assert pruner_of(card("all tokens", budget=N).provenance, None) == NO_PRUNING.pruner
    share = pruner_of(card("grid", budget=3, share="1/3").provenance, None)
    assert share.budget == Budget.parse("1/3")
    policy = stepprune()
    for mode, budget, expected in (
        ("exact", 4, Budget("count", 4)),
        ("adaptive", 4, Budget("mean", 4)),
        ("adaptive", None, Budget("own")),
    ):
        made = card("StepPrune", mode, budget, policy="x", group=None).provenance
        assert pruner_of(made, policy) == StepPrune(expected, config=policy.config)
    assert pruner_of(card("StepPrune", policy="x").provenance, None) is None
    assert pruner_of(card("a method of earlier days").provenance, None) is None


def test_policies_are_those_that_answered(tmp_path):
    own = save_policy(stepprune(), tmp_path / "policy.safetensors")
    row = save_policy(one_shot(), tmp_path / "row.safetensors")
    settings = EvalSettings(rows={"mine": str(row), "gone": str(tmp_path / "gone")})
    mine, other = policy_digest(stepprune()), policy_digest(stepprune(7))
    files = [
        card("grid"),
        card("StepPrune, own stop", "adaptive", None, policy=mine),
        card("StepPrune", policy=other),  # trained anew since
        card("mine", policy=policy_digest(one_shot())),
        card("gone", policy=other),
        card("of another configuration", policy=other),
    ]
    found = row_policies(settings, files, own)
    assert [policy and policy.method for policy in found] == [
        *(None, "stepprune", None, "autoselect", None, None)
    ]
    assert row_policies(settings, files, None)[1] is None
