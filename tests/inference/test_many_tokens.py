"""Images of 1,280 and of 16,384 visual tokens, from pixels to an answer and in memory."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny_qwen import qwen_tokenizer, tiny_qwen, tiny_qwen_config
from visual import noise

from stepprune_jax import PolicyConfig, policy
from stepprune_jax.checkpoints.load import load_vlm
from stepprune_jax.inference import RunOptions, generate
from stepprune_jax.inference.programs import num_compiled
from stepprune_jax.models import attention
from stepprune_jax.models.qwen2_5_vl import Qwen2_5_VL, QwenConfig
from stepprune_jax.parallel.sharding import build_mesh
from stepprune_jax.policy import FeatureStats, layers
from stepprune_jax.registry import build_pruner
from stepprune_jax.selectors import StepPrune
from tools.bench.memory import compiled_programs

MANY, MOST = 1_280, 16_384
WIDTHS = {"feature_width": 48, "text_width": 48, "width": 16, "num_heads": 4, "mlp_ratio": 1}
POLICY = PolicyConfig(**WIDTHS, encoder_layers=1, decoder_layers=1)


@pytest.mark.parametrize(
    ("tokens", "name"),
    [
        (MANY, "stepprune"),
        pytest.param(MOST, "stepprune", marks=pytest.mark.slow),
        pytest.param(MOST, "visionzip", marks=pytest.mark.slow),
    ],
)
def test_an_image_of_many_tokens_is_pruned_and_answered(tokens, name, tmp_path):
    vision = tiny_qwen_config(qwen_tokenizer())["vision_config"]
    vision |= {"depth": 2, "num_heads": 1, "fullatt_block_indexes": [1]}
    folder = tiny_qwen(
        tmp_path,
        max_pixels=64 * tokens,
        max_position_embeddings=2 * MOST,
        num_hidden_layers=2,
        vision_config=vision,
    )
    model = load_vlm(folder, dtype=jnp.float32, progress=False)
    key, stats = jax.random.key(0), FeatureStats.start(48)
    policy_of_method = (
        StepPrune(params=policy.init_policy(key, POLICY), config=POLICY, stats=stats)
        if name == "stepprune"
        else None
    )
    columns = 32 if tokens == MANY else 128
    method = build_pruner(name, 100, policy=policy_of_method)
    for missing in (0, 2, 3):
        before, rows = num_compiled(), tokens // columns - missing
        images = [noise(rows, (8 * rows, 8 * columns))]  # a token has 8 x 8 pixels
        options = RunOptions(2)
        (answer,) = generate(model, ["Is it red?"], [images], method, options=options)
        assert (answer.visual_tokens, answer.kept) == (rows * columns, 100)
    # A whole bucket of tokens has a program, and all smaller images in it share another one.
    assert num_compiled() == before


def scores(heads, queries):
    """Bytes of the attention scores of a whole row in float32."""
    return 4 * heads * queries**2


def test_no_program_holds_all_scores_of_16_384_tokens():
    config = QwenConfig.from_hf(tiny_qwen_config(qwen_tokenizer()))
    config = dataclasses.replace(config, min_pixels=256, max_pixels=64 * MOST)
    assert config.max_image_tokens == MOST
    names, length = ("encode", "prefill"), MOST + 64
    programs = compiled_programs(Qwen2_5_VL(config), build_mesh("single"), 1, length, 32, names)
    shape = jax.ShapeDtypeStruct
    params = jax.eval_shape(lambda: policy.init_policy(jax.random.key(0), POLICY))

    def select(params, image, text):
        inputs = policy.Inputs(image, text)
        return policy.choose(params, POLICY, inputs), policy.rank(params, POLICY, inputs)

    shapes = shape((1, MOST, 48), jnp.bfloat16), shape((1, 64, 48), jnp.bfloat16)
    programs["select"] = jax.jit(select).lower(params, *shapes).compile()
    all_scores = {
        "encode": scores(config.vision.num_heads, MOST * config.vision.unit),
        "prefill": scores(config.text.num_heads, length),
        "select": scores(POLICY.num_heads, MOST),
    }
    for name, program in programs.items():
        assert program.memory_analysis().temp_size_in_bytes < all_scores[name] / 2, name


def test_attention_is_the_same_a_few_queries_at_a_time(monkeypatch):
    """To a cache and to a row's own keys, whose heads are shared by two of the queries'."""
    random, queries = np.random.default_rng(0), 9
    query = jnp.asarray(random.normal(size=(2, 4, queries, 4)), jnp.float32)
    segments = [
        attention.Segment(*jnp.asarray(random.normal(size=(2, 2, 2, keys, 4)), jnp.float32), mask)
        for keys, mask in (
            (5, jnp.asarray(random.random((2, 1, 5)) < 0.7)),
            (queries, jnp.asarray(random.random((2, queries, queries)) < 0.7)),
            (3, None),
        )
    ]

    def both():
        def run(query):
            return (attention.attend(query, segments) ** 2).sum()

        return jax.jit(jax.value_and_grad(run))(query)

    at_once = both()
    monkeypatch.setattr(layers, "MANY_QUERIES", 6)
    monkeypatch.setattr(layers, "QUERIES", {"default": 4})
    jax.tree.map(functools.partial(np.testing.assert_allclose, atol=1e-4), both(), at_once)
