"""Stacked layers, which run as a scan, give the same results as a list of unrolled layers."""

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
from stepprune_jax.models.weights import join_kernels, separate_kernels


@functools.partial(jax.jit, static_argnums=1)
def run_model(params, config, pixels, sequence):
    """Runs all programs with layers: tower, a stage with taps, stages with a cut, a decode step."""
    taps = (Tap("hidden", -3), Tap("attention", 1))
    encoded = Llava(config).encode_image(params, pixels, taps)
    outputs = OutputSpec(None, (Tap("hidden", 1), Tap("keys", 2)))
    stage = decoder.run_layers(
        params["language"], config.text, sequence.rows, (0, 4), None, outputs
    )

    def drop(rows, taps):
        attended = (taps["attention.0"] * taps["scores.2"]).sum((1, 2)) > 0
        return rows, attended & ((rows.image < 0) | (rows.index % 2 == 0))

    cuts = (vlm.Cut(2, 20, drop, (Tap("attention", 0), Tap("scores", 2))),)
    pruned = vlm.prefill(params, config, sequence, 2, cuts)
    token = jnp.argmax(pruned.logits, -1)
    return encoded, stage, pruned, vlm.decode_step(params, config, token, pruned.cache)


def test_unstacked_layers_give_the_results_of_stacked_layers(llava):
    _, config, params = llava
    sequence = prompts.assemble(params, config, *prompts.batch())
    unstacked, pixels = unstack(params), random_bytes(1, 2, 3, 28, 28)
    stacked = run_model(params, config, pixels, sequence)
    assert int(stacked[2].cuts[0].length.sum()) < int(sequence.length.sum())
    assert_allclose = functools.partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-5)
    jax.tree.map(assert_allclose, run_model(unstacked, config, pixels, sequence), stacked)


def test_joined_matrices_give_the_results_of_separate_matrices(llava):
    """GPUs run joined matrices. Here the language model also has biases and grouped key heads."""
    _, config, _ = llava
    text = dataclasses.replace(config.text, qkv_bias=True, num_kv_heads=config.text.num_heads // 2)
    config = dataclasses.replace(config, text=text)
    params = jax.jit(vlm.init_params, static_argnums=1)(jax.random.key(3), Llava(config))
    noise_keys = iter(jax.random.split(jax.random.key(4), len(jax.tree.leaves(params))))
    params = jax.tree.map(lambda x: x + 0.1 * jax.random.normal(next(noise_keys), x.shape), params)
    joined = join_kernels(jax.tree.map(jnp.copy, params))
    attention = joined["language"]["layers"]["attention"]
    c = text.head_dim
    assert attention["query_key_value"]["bias"].shape == (4, 2 * text.num_heads * c)
    assert {*joined["language"]["layers"]["mlp"]} == {"gate_up", "down"}
    jax.tree.map(np.testing.assert_array_equal, separate_kernels(joined, params), params)
    sequence = prompts.assemble(params, config, *prompts.batch())
    pixels = random_bytes(1, 2, 3, 28, 28)
    expected = run_model(params, config, pixels, sequence)
    assert_allclose = functools.partial(np.testing.assert_allclose, rtol=2e-5, atol=2e-5)
    jax.tree.map(assert_allclose, run_model(unstack(joined), config, pixels, sequence), expected)


def test_layers_of_at_least_32_mib_are_large():
    def is_large(width):
        kernel = jax.ShapeDtypeStruct((2, width, 2048), jnp.bfloat16)
        return has_large_layers({"a": {"layers": {"kernel": kernel}}, "b": {}})

    assert is_large(8192) and not is_large(8191)
