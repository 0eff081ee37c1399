import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
import transformers
from hf_reference import (
    TEXT,
    as_torch,
    assert_close,
    llama_pair,
)

from stepprune_jax.models import decoder as llama
from stepprune_jax.models.attention import Tap
from stepprune_jax.models.config import LlamaConfig
from stepprune_jax.models.rotary import rotary, rotary_frequencies
from stepprune_jax.models.sequence import Rows
from stepprune_jax.models.stack import Execution


def inputs(b=2, s=11):
    ids = jax.random.randint(jax.random.key(0), (b, s), 0, 90)
    position = jnp.broadcast_to(jnp.arange(s), (b, s))
    return ids, position, jnp.ones((b, s), bool)


@functools.partial(jax.jit, static_argnums=1, static_argnames=("taps", "capacity", "execution"))
def run(params, config, ids, position, valid, execution=Execution(), **wanted):
    rows = Rows(llama.embed(params, ids), position, valid)
    span, wanted = (0, config.num_layers), llama.Wanted(**wanted)
    stage = llama.run_layers(params, config, rows, span, None, wanted, execution)
    return llama.logits(params, config, stage.hidden), stage


@pytest.mark.parametrize("kv_heads", [4, 2, 1])
def test_logits_and_every_intermediate_equal_the_reference(kv_heads):
    model, config, params = llama_pair(num_key_value_heads=kv_heads)
    ids, position, valid = inputs()
    taps = [Tap("hidden", layer) for layer in range(5)]
    taps += [Tap(kind, layer) for kind in ("attention", "keys", "mlp_input") for layer in range(4)]
    taps += [Tap("normed", layer) for layer in range(5)]
    query_index = jnp.array([[10, 3], [0, 7]])
    ours, stage = run(
        params, config, ids, position, valid, taps=tuple(taps), query_index=query_index
    )
    read = []
    for block in model.model.layers:
        block.mlp.register_forward_hook(lambda _, given, __: read.append(given[0]))
    cache = transformers.DynamicCache(config=model.config)
    # By position: transformers 5.24 renamed the cache's argument.
    theirs = model(
        as_torch(ids), None, None, cache, output_hidden_states=True, output_attentions=True
    )
    assert_close(ours, theirs.logits, what="logits")
    for layer in range(4):
        assert_close(stage.taps[f"hidden.{layer}"], theirs.hidden_states[layer])
        full = theirs.attentions[layer]
        rows = torch.stack([full[row][:, query_index[row].tolist()] for row in range(2)])
        assert_close(stage.taps[f"attention.{layer}"], rows, what=f"attention {layer}")
        assert_close(stage.taps[f"keys.{layer}"], cache.layers[layer].keys)
        assert_close(stage.taps[f"mlp_input.{layer}"], read[layer], what=f"mlp input {layer}")
        normed = model.model.norm(theirs.hidden_states[layer])
        assert_close(stage.taps[f"normed.{layer}"], normed, what=f"normed {layer}")
    # The reference norms its last hidden state.
    assert_close(stage.taps["normed.4"], theirs.hidden_states[4])


@pytest.mark.parametrize(
    "changes",
    [
        {"rope_parameters": {"rope_type": "linear", "factor": 4.0, "rope_theta": 10000.0}},
        {
            "rope_parameters": {
                "rope_type": "llama3",
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 64,
                "rope_theta": 500000.0,
            }
        },
        {"head_dim": 32, "tie_word_embeddings": True},
        pytest.param(
            {
                "hidden_size": 4096,
                "intermediate_size": 11008,
                "num_attention_heads": 32,
                "num_key_value_heads": 32,
                "num_hidden_layers": 1,
            },
            marks=pytest.mark.slow,
        ),
    ],
    ids=["linear", "llama3", "wide heads and tied head", "widths of Vicuna 7B"],
)
def test_variants_equal_the_reference(changes):
    model, config, params = llama_pair(**{"num_hidden_layers": 2} | changes)
    if config.tie_embeddings:
        assert "head" not in params
    ids, _, valid = inputs()
    position = 20 * jnp.broadcast_to(jnp.arange(11), ids.shape)
    ours, _ = run(params, config, ids, position, valid)
    theirs = model(as_torch(ids), position_ids=as_torch(position))
    assert_close(ours, theirs.logits)


def test_rotary_angles_equal_the_reference_at_far_positions():
    fields = {**TEXT, "hidden_size": 4096, "num_attention_heads": 32, "num_key_value_heads": 32}
    theirs = transformers.models.llama.modeling_llama.LlamaRotaryEmbedding(
        transformers.LlamaConfig(**fields)
    )
    config = LlamaConfig.from_hf(fields)
    np.testing.assert_allclose(rotary_frequencies(config), theirs.inv_freq.numpy(), rtol=2e-7)
    position = jnp.arange(0, 2048, 89)[None]
    cosine, sine = theirs(torch.zeros(1), as_torch(position))
    ours = rotary(config, position)
    np.testing.assert_allclose(ours[0], cosine.numpy(), atol=3e-4)
    np.testing.assert_allclose(ours[1], sine.numpy(), atol=3e-4)


def test_bfloat16_is_within_its_rounding_of_float32():
    _, config, params = llama_pair()
    ids, position, valid = inputs()
    wide, _ = run(params, config, ids, position, valid)
    narrow = jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), params)
    ours, stage = run(narrow, config, ids, position, valid, capacity=16)
    assert ours.dtype == jnp.float32
    assert stage.cache.key.dtype == jnp.bfloat16
    # 8 bits of mantissa; about 3 roundings a block add up over 4 blocks.
    assert_close(ours, wide, 12 * 2.0**-9)


def test_fused_attention_equals_matrix_products_on_padded_rows():
    _, config, params = llama_pair()
    ids, position, valid = inputs()
    valid = valid.at[1, 6:].set(False)
    plain, _ = run(params, config, ids, position, valid)
    fused, _ = run(params, config, ids, position, valid, execution=Execution(attention="xla"))
    assert_close(fused[0], plain[0])
    assert_close(fused[1, :6], plain[1, :6])


def test_training_through_the_layers_keeps_no_copy_of_the_weights():
    _, config, params = llama_pair(num_hidden_layers=4, hidden_size=128, intermediate_size=512)
    ids, position, valid = inputs(b=1, s=4)
    gradients = []
    for remat in (False, True):

        @jax.jit
        def gradient(hidden, params, remat=remat):
            def loss(hidden):
                rows = Rows(hidden, position, valid)
                how = Execution(remat=remat)
                stage = llama.run_layers(params, config, rows, (0, 4), execution=how)
                return jnp.square(stage.hidden).sum()

            return jax.grad(loss)(hidden)

        hidden = llama.embed(params, ids)
        compiled = gradient.lower(hidden, params).compile()
        stack = sum(leaf.nbytes for leaf in jax.tree.leaves(params["layers"]))
        # One layer's slice at a time is fine, a quarter of the stack; with it its transpose.
        assert compiled.memory_analysis().temp_size_in_bytes < 0.8 * stack
        gradients.append(compiled(hidden, params))
    assert_close(*gradients)


@pytest.mark.parametrize(
    ("span", "wanted", "message"),
    [
        ((0, 4), {"taps": [Tap("attention", 0)]}, "tap attention.0: needs query_index"),
        ((0, 2), {"taps": [Tap("keys", 3)]}, "tap keys.3"),
        ((0, 4), {"taps": [Tap("values", 0)]}, "tap values.0"),
    ],
)
def test_stages_that_do_not_fit_are_refused(span, wanted, message):
    _, config, params = llama_pair()
    ids, position, valid = inputs(b=1, s=4)
    rows = Rows(llama.embed(params, ids), position, valid)
    with pytest.raises(ValueError, match=message):
        llama.run_layers(params, config, rows, span, wanted=llama.Wanted(**wanted))
