"""Layers run as a scan over stacked weights, and written out from a list."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import prompts
from visual import random_bytes

from stepprune_jax.models import decoder, vlm
from stepprune_jax.models.attention import Tap
from stepprune_jax.models.decoder import OutputSpec
from stepprune_jax.models.llava import Llava
from stepprune_jax.models.stack import has_large_layers, unstack
from stepprune_jax.models.weights import join, separate


@functools.partial(jax.jit, static_argnums=1)
def answer(params, config, pixels, sequence):
    """All that is run in layers: tower, a stage with taps, stages with a cut, a decoded token."""
    taps = (Tap("hidden", -3), Tap("attention", 1))
    seen = Llava(config).encode_image(params, pixels, taps)
    wanted = OutputSpec(None, (Tap("hidden", 1), Tap("keys", 2)))
    stage = decoder.run_layers(params["language"], config.text, sequence.rows, (0, 4), None, wanted)

    def drop(rows, taps):
        attended = (taps["attention.0"] * taps["scores.2"]).sum((1, 2)) > 0
        return rows, attended & ((rows.image < 0) | (rows.index % 2 == 0))

    cuts = (vlm.Cut(2, 20, drop, (Tap("attention", 0), Tap("scores", 2))),)
    pruned = vlm.prefill(params, config, sequence, 2, cuts)
    token = jnp.argmax(pruned.logits, -1)
    return seen, stage, pruned, vlm.decode_step(params, config, token, pruned.cache)


def test_unstacked_layers_give_what_stacked_ones_do_with_taps_cuts_and_caches(llava):
    _, config, params = llava
    sequence = prompts.assemble(params, config, *prompts.batch())
    listed, pixels = unstack(params), random_bytes(1, 2, 3, 28, 28)
    stacked = answer(params, config, pixels, sequence)
    assert int(stacked[2].cuts[0].length.sum()) < int(sequence.length.sum())
    close = functools.partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-5)
    jax.tree.map(close, answer(listed, config, pixels, sequence), stacked)


def test_joined_matrices_give_what_separate_ones_do(llava):
    """As GPUs have them; with biases and grouped heads in the language model, too."""
    _, config, _ = llava
    text = dataclasses.replace(config.text, qkv_bias=True, num_kv_heads=config.text.num_heads // 2)
    config = dataclasses.replace(config, text=text)
    params = vlm.init_params(jax.random.key(3), Llava(config))
    noise = iter(jax.random.split(jax.random.key(4), len(jax.tree.leaves(params))))
    params = jax.tree.map(lambda x: x + 0.1 * jax.random.normal(next(noise), x.shape), params)
    joined = join(jax.tree.map(jnp.copy, params))
    attention = joined["language"]["layers"]["attention"]
    c = text.head_dim
    assert attention["query_key_value"]["bias"].shape == (4, 2 * text.num_heads * c)
    assert {*joined["language"]["layers"]["mlp"]} == {"gate_up", "down"}
    jax.tree.map(np.testing.assert_array_equal, separate(joined, params), params)
    sequence, pixels = (
        prompts.assemble(params, config, *prompts.batch()),
        random_bytes(1, 2, 3, 28, 28),
    )
    expected = answer(params, config, pixels, sequence)
    close = functools.partial(np.testing.assert_allclose, rtol=2e-5, atol=2e-5)
    jax.tree.map(close, answer(joined, config, pixels, sequence), expected)
    jax.tree.map(close, answer(unstack(joined), config, pixels, sequence), expected)


def test_layers_of_32_mib_are_large():
    def large(width):
        kernel = jax.ShapeDtypeStruct((2, width, 2048), jnp.bfloat16)
        return has_large_layers({"a": {"layers": {"kernel": kernel}}, "b": {}})

    assert large(8192) and not large(8191)
