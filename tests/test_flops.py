"""Operation counts compared with counts by hand, published figures and the compiler's count."""

import functools

import jax
import jax.numpy as jnp
import pytest
from jax.interpreters import partial_eval

from stepprune_jax import policy
from stepprune_jax.efficiency.model_shapes import MODELS
from stepprune_jax.flops import llm_flops, policy_flops, traced_flops, vision_flops
from stepprune_jax.models import vlm
from stepprune_jax.models.llava import Llava, LlavaConfig
from stepprune_jax.models.sequence import from_embeddings
from stepprune_jax.testing import tiny_hf_config

SEVEN_B = LlavaConfig.from_hf(MODELS["llava-7b"])
TEXT_TOKENS = 100


def tera(count):
    return round(count / 1e12, 3)


def layered_flops(tokens):
    """Returns 2 x MACs of the layers in units of 10^12, as in the tables of pruning papers."""
    return tera(2 * llm_flops(SEVEN_B.text, tokens).layer_macs)


def test_the_cost_of_one_layer_equals_the_count_by_hand():
    # 3 tokens, width 4, 2 query heads and 1 key head of 2 channels, MLP width 5, 7 words.
    text = {"hidden_size": 4, "intermediate_size": 5, "num_hidden_layers": 1, "vocab_size": 7}
    text |= {"num_attention_heads": 2, "num_key_value_heads": 1}
    config = LlavaConfig.from_hf(tiny_hf_config(text=text)).text
    cost = llm_flops(config, 3)
    # Queries and outputs 3 * 4 * 4 each, keys and values 3 * 4 * 2 each.
    assert cost.projections == 48 + 48 + 24 + 24
    # Scores 3 * 3 * 4, and as much for weighted values. Half of the pairs are masked.
    assert cost.attention == 72
    assert cost.mlp == 3 * 3 * 4 * 5
    assert cost.head == 4 * 7
    assert cost.layer_macs == 144 + 72 + 180
    assert cost.flops == 2 * (396 + 28)
    assert cost.causal_flops == 2 * (396 + 28 - 36)


def test_macs_of_visual_tokens_equal_published_figures():
    # MACs of image tokens in https://arxiv.org/abs/2410.17247: 3.82 T, and 1.78 T if pruned to 288,
    # 144 and 72 tokens before layers 8, 16 and 24.
    stages = [n for n in (576, 288, 144, 72) for _ in range(8)]
    assert tera(llm_flops(SEVEN_B.text, 576).layer_macs) == 3.817
    assert tera(llm_flops(SEVEN_B.text, stages).layer_macs) == 1.777


def test_flops_with_text_equal_published_tables():
    stages = [n + TEXT_TOKENS for n in (576, 288, 144, 72) for _ in range(8)]
    assert layered_flops(576 + TEXT_TOKENS) == 8.995
    assert layered_flops(64 + TEXT_TOKENS) == 2.138
    assert layered_flops(stages) == 4.884
    assert layered_flops([676] * 2 + [164] * 30) == 2.567
    cost = llm_flops(SEVEN_B.text, 676, num_logits=0)
    assert tera(cost.causal_flops) == 8.875


def test_bad_token_counts_are_refused():
    with pytest.raises(ValueError, match=r"prompt_tokens.*32 layers"):
        llm_flops(SEVEN_B.text, [1, 2, 3])
    with pytest.raises(ValueError, match="prompt_tokens is -1"):
        llm_flops(SEVEN_B.text, -1)


def compiler_count(function, *arguments):
    """Returns XLA's count of a program's operations, which counts the body of a loop once."""
    return jax.jit(function).lower(*arguments).cost_analysis()["flops"]


def test_formulas_equal_the_compilers_count_within_a_few_percent():
    sizes = {"hidden_size": 128, "intermediate_size": 512, "num_attention_heads": 4}
    config = LlavaConfig.from_hf(
        tiny_hf_config(
            vision={**sizes, "num_hidden_layers": 2, "image_size": 112},
            text={**sizes, "num_hidden_layers": 1},
        )
    )
    backbone = Llava(config)
    params = vlm.abstract_params(backbone, jnp.float32)
    sequence = jax.eval_shape(
        functools.partial(from_embeddings, config),
        jax.ShapeDtypeStruct((1, 96, 128), jnp.float32),
        jax.ShapeDtypeStruct((1,), jnp.int32),
    )
    counted = compiler_count(lambda p, s: vlm.prefill(p, config, s, 4).logits, params, sequence)
    assert counted == pytest.approx(llm_flops(config.text, 96).flops, rel=0.04)
    # With feature layer -2 of a tower with two blocks, one block runs.
    counted = compiler_count(
        lambda p, x: backbone.project(p, backbone.encode_image(p, x)[0]),
        params,
        jax.ShapeDtypeStruct((1, 3, 112, 112), jnp.uint8),
    )
    one_image = vision_flops(backbone, [config.grid])
    assert counted == pytest.approx(one_image["total"], rel=0.04)
    assert vision_flops(backbone, [config.grid] * 2)["total"] == 2 * one_image["total"]


def traced_choice(config, limits, num_tokens=40):
    """Returns the operations of a traced `policy.choose`, without operations of unused results."""

    def run(params, image, text):
        return policy.choose(params, config, policy.Inputs(image, text), limits)

    shape = jax.ShapeDtypeStruct
    inputs = (shape((1, num_tokens, 24), jnp.float32), shape((1, 5, 12), jnp.float32))
    traced = jax.make_jaxpr(run)(policy.abstract_policy(config), *inputs).jaxpr
    needed, _ = partial_eval.dce_jaxpr(traced, [True] * len(traced.outvars))
    return traced_flops(needed)


# A loop of unknown length counts once, so T_max is one block of 16 tokens.
WIDTHS = {"feature_width": 24, "text_width": 12, "width": 16, "num_heads": 4, "max_steps": 16}


@pytest.mark.parametrize(
    ("layers", "stop", "group"), [(1, "hazard", 1), (2, "aligned", 4), (3, "hazard", 4)]
)
def test_the_policys_formula_equals_the_traced_count(layers, stop, group):
    config = policy.PolicyConfig(**WIDTHS, decoder_layers=layers, stop=stop, group=group)
    learned_stop = policy_flops(config, 40, 5, 15, exact=False)
    assert traced_choice(config, policy.Limits()) == learned_stop["total"]
    assert traced_choice(config, policy.Limits(16)) == policy_flops(config, 40, 5, 16)["total"]


@pytest.mark.parametrize("layers", [1, 2])
def test_tables_over_pairs_count_only_if_they_are_computed(layers, monkeypatch):
    monkeypatch.setattr("stepprune_jax.policy.layers.MANY_QUERIES", 64)
    monkeypatch.setattr("stepprune_jax.policy.layers.QUERIES", {"default": 1})
    config = policy.PolicyConfig(**WIDTHS, decoder_layers=layers)
    for num_tokens in (62, 64):  # 4 x 16 steps are fewer than 65 slots
        counted = traced_choice(config, policy.Limits(16), num_tokens)
        assert counted == policy_flops(config, num_tokens, 5, 16)["total"]
    slot = [policy_flops(config, n, 5, 16)["tables"] / (n + 1) for n in (62, 64)]
    assert slot[0] - slot[1] == 2 * 63 * 16 * (2 if layers == 1 else 1)
    config = policy.PolicyConfig(feature_width=1024, decoder_layers=layers)
    at_320, at_1464 = (policy_flops(config, 2928, 64, kept)["tables"] for kept in (320, 1464))
    assert at_1464 - at_320 == 2 * 2929**2 * 1024 * (2 if layers == 1 else 1)


@pytest.mark.parametrize("layers", [1, 2])
def test_without_tables_the_formula_counts_steps_of_the_decoder(layers, monkeypatch):
    for module in ("flops", "policy.selection"):
        monkeypatch.setattr(f"stepprune_jax.{module}.MAX_TABLE_BYTES", 1)
    config = policy.PolicyConfig(**WIDTHS, decoder_layers=layers)
    assert traced_choice(config, policy.Limits(1)) == policy_flops(config, 40, 5, 1)["total"]


def test_traced_operations_equal_the_count_by_hand():
    x, w = jnp.ones((3, 4)), jnp.ones((5, 4, 4))
    once = 2 * 3 * 4 * 4

    def body(x, w):
        return jnp.sin(x @ w), None

    def stack(x, w):
        return jax.lax.scan(body, x, w)[0]

    def count(function):
        return traced_flops(jax.make_jaxpr(function)(x, w))

    assert count(lambda x, w: jnp.einsum("ij,kjl->ikl", x, w)) == 5 * once
    assert count(stack) == count(jax.jit(stack)) == 5 * once
    assert count(lambda x, w: jax.lax.cond(x[0, 0] > 0, stack, lambda x, w: x, x, w)) == 5 * once
    # The gradient of one factor of a product is another product. Recomputation counts again.
    loss = lambda x, w: stack(x, w).sum()  # noqa: E731
    assert count(jax.grad(loss)) == 2 * 5 * once
    assert count(jax.grad(loss, argnums=(0, 1))) == 3 * 5 * once
    body = jax.checkpoint(body)
    assert count(jax.grad(loss)) == 3 * 5 * once
