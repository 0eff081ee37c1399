import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
import transformers
from hf_reference import TEXT, as_torch, assert_close, make_llava, normal
from visual import random_bytes

from stepprune_jax.models import decoder as llama
from stepprune_jax.models.attention import Tap
from stepprune_jax.models.config import LlamaConfig
from stepprune_jax.models.llava import Llava
from stepprune_jax.models.rotary import rotary_cos_sin
from stepprune_jax.models.sequence import Rows
from stepprune_jax.models.stack import Execution


@pytest.fixture(scope="module")
def language(llava):
    """Returns the configuration and the weights of the language model."""
    return language_of(llava)


def language_of(llava):
    return llava.config.text, llava.params["language"]


def inputs(b=2, s=11):
    ids = jax.random.randint(jax.random.key(0), (b, s), 0, 90)
    position = jnp.broadcast_to(jnp.arange(s), (b, s))
    return ids, position, jnp.ones((b, s), bool)


@functools.partial(jax.jit, static_argnums=1, static_argnames=("taps", "capacity", "execution"))
def run(params, config, ids, position, valid, execution=Execution(), **output_fields):
    rows = Rows(llama.embed(params, ids), position, valid)
    outputs = llama.OutputSpec(**output_fields)
    stage = llama.run_layers(
        params, config, rows, (0, config.num_layers), outputs=outputs, execution=execution
    )
    return llama.logits(params, config, stage.hidden), stage


def test_logits_and_every_intermediate_equal_the_reference(llava, language):
    config, params = language
    ids, position, valid = inputs()
    taps = [Tap("hidden", layer) for layer in range(5)]
    taps += [Tap(kind, layer) for kind in ("attention", "keys", "mlp_input") for layer in range(4)]
    taps += [Tap("normed", layer) for layer in range(5)]
    query_index = jnp.array([[10, 3], [0, 7]])
    ours, stage = run(
        params, config, ids, position, valid, taps=tuple(taps), query_index=query_index
    )
    model = llava.torch.model.language_model
    mlp_inputs, hooks = [], []
    for block in model.layers:
        hook = block.mlp.register_forward_hook(lambda _, inputs, __: mlp_inputs.append(inputs[0]))
        hooks.append(hook)
    cache = transformers.DynamicCache(config=model.config)
    # The cache is passed by position, because transformers 5.24 renamed this argument.
    theirs = model(
        as_torch(ids), None, None, cache, output_hidden_states=True, output_attentions=True
    )
    for hook in hooks:
        hook.remove()
    assert_close(ours, llava.torch.lm_head(theirs.last_hidden_state), what="logits")
    for layer in range(4):
        assert_close(stage.taps[f"hidden.{layer}"], theirs.hidden_states[layer])
        attention = theirs.attentions[layer]
        rows = torch.stack([attention[row][:, query_index[row].tolist()] for row in range(2)])
        assert_close(stage.taps[f"attention.{layer}"], rows, what=f"attention {layer}")
        assert_close(stage.taps[f"keys.{layer}"], cache.layers[layer].keys)
        assert_close(stage.taps[f"mlp_input.{layer}"], mlp_inputs[layer], what=f"mlp input {layer}")
        normed = model.norm(theirs.hidden_states[layer])
        assert_close(stage.taps[f"normed.{layer}"], normed, what=f"normed {layer}")
    # The reference applies the final norm to its last hidden state.
    assert_close(stage.taps["normed.4"], theirs.hidden_states[4])


def test_large_heads_and_a_tied_head_equal_the_reference(tmp_path):
    fields = {"head_dim": 32, "num_key_value_heads": 4, "num_hidden_layers": 1}
    pair = make_llava(tmp_path, text=fields, tie_word_embeddings=True)
    config, params = language_of(pair)
    assert "head" not in params
    ids, position, valid = inputs()
    ours, _ = run(params, config, ids, position, valid)
    assert_close(ours, pair.torch(as_torch(ids)).logits)


LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}


@pytest.mark.parametrize("scaling", [{}, {"rope_type": "linear", "factor": 4.0}, LLAMA3])
def test_rotary_angles_equal_the_reference_at_far_positions(scaling):
    rope = {"rope_type": "default", "rope_theta": 10000.0} | scaling
    fields = TEXT | {"hidden_size": 4096, "num_attention_heads": 32, "rope_parameters": rope}
    theirs = transformers.models.llama.modeling_llama.LlamaRotaryEmbedding(
        transformers.LlamaConfig(**fields)
    )
    position = jnp.arange(0, 2048, 89)[None]
    ours = rotary_cos_sin(LlamaConfig.from_hf(fields), position)
    for part, expected in zip(ours, theirs(torch.zeros(1), as_torch(position)), strict=True):
        np.testing.assert_allclose(part, expected.numpy(), atol=3e-4)


def test_bfloat16_is_within_its_rounding_of_float32(language):
    config, params = language
    ids, position, valid = inputs()
    expected, _ = run(params, config, ids, position, valid)
    bfloat16_params = jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), params)
    ours, stage = run(bfloat16_params, config, ids, position, valid, capacity=16)
    assert ours.dtype == jnp.float32
    assert stage.cache.key.dtype == jnp.bfloat16
    # bfloat16 has 8 bits of mantissa; about 3 roundings per block add up over 4 blocks.
    assert_close(ours, expected, 12 * 2.0**-9)


def test_fused_attention_equals_matrix_products_on_padded_rows(language):
    config, params = language
    ids, position, valid = inputs()
    valid = valid.at[1, 6:].set(False)
    expected, _ = run(params, config, ids, position, valid)
    fused, _ = run(params, config, ids, position, valid, execution=Execution(attention="xla"))
    assert_close(fused[0], expected[0])
    assert_close(fused[1, :6], expected[1, :6])


def test_a_gradient_through_the_layers_stores_no_copy_of_the_weights(language):
    config, params = language
    hidden, position, valid = normal(7, 1, 4, 64), *inputs(b=1, s=4)[1:]
    gradients = []
    for remat in (False, True):

        @jax.jit
        def gradient(hidden, params, remat=remat):
            def loss(hidden):
                rows = Rows(hidden, position, valid)
                execution = Execution(remat=remat)
                stage = llama.run_layers(params, config, rows, (0, 4), execution=execution)
                return jnp.square(stage.hidden).sum()

            return jax.grad(loss)(hidden)

        compiled = gradient.lower(hidden, params).compile()
        stack_bytes = sum(leaf.nbytes for leaf in jax.tree.leaves(params["layers"]))
        # A slice of one layer and its transpose are allowed; each is a quarter of the stack.
        assert compiled.memory_analysis().temp_size_in_bytes < 0.8 * stack_bytes
        gradients.append(compiled(hidden, params))
    assert_close(*gradients)


@pytest.mark.parametrize("tap", [Tap("attention", 0), Tap("keys", 3), Tap("values", 0)])
def test_invalid_taps_are_refused(language, tap):
    config, params = language
    rows = Rows(normal(8, 1, 4, 64), *inputs(b=1, s=4)[1:])
    with pytest.raises(ValueError, match=f"tap {tap.kind}.{tap.layer}: "):
        llama.run_layers(params, config, rows, (0, 2), outputs=llama.OutputSpec(taps=[tap]))


@pytest.mark.slow
def test_published_widths_equal_the_reference(tmp_path):
    """Compares one block of CLIP-L and one block of Vicuna 7B."""
    vision = {"hidden_size": 1024, "intermediate_size": 4096, "num_attention_heads": 16}
    vision |= {"num_hidden_layers": 1, "image_size": 336, "patch_size": 14}
    text = {"hidden_size": 4096, "intermediate_size": 11008, "num_attention_heads": 32}
    text |= {"num_hidden_layers": 1, "num_key_value_heads": 32}
    pair = make_llava(tmp_path, vision, text, vision_feature_layer=-1)
    pixels, backbone = jnp.asarray(random_bytes(4, 2, 3, 336, 336)), Llava(pair.config)
    features, _ = backbone.encode_image(pair.params, pixels)
    normalised = as_torch(backbone.normalise(pixels))
    theirs = pair.torch.model.vision_tower(normalised, output_hidden_states=True)
    assert_close(features, theirs.hidden_states[-1][:, 1:])
    config, params = language_of(pair)
    ids, _, valid = inputs()
    position = 20 * jnp.broadcast_to(jnp.arange(11), ids.shape)
    ours, _ = run(params, config, ids, position, valid)
    assert_close(ours, pair.torch(as_torch(ids), position_ids=as_torch(position)).logits)
