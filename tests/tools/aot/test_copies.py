"""Compiled programs of an answer copy no weights."""

import functools

import jax
import jax.numpy as jnp
import pytest
from aot_targets import find_target
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from stepprune_jax import testing
from stepprune_jax.efficiency.model_shapes import MODELS
from stepprune_jax.models import stack, vlm
from stepprune_jax.models.decoder import init_cache
from stepprune_jax.models.llava import Llava, LlavaConfig
from stepprune_jax.models.sequence import from_embeddings
from stepprune_jax.models.weights import flatten, join_kernels
from stepprune_jax.parallel.placement import uses_joined_weights
from stepprune_jax.parallel.programs import jit_for_weights
from tools.aot.hlo import copied_weights
from tools.bench.backbone import PRESETS

TOKENS = 40


@functools.cache
def config_of(name):
    """Returns a model of a few layers with the widths of LLaVA-7B, which affect the compiler."""
    text, vision = {"num_hidden_layers": 2}, {"num_hidden_layers": 3}
    if name == "cpu":  # Small widths compile faster.
        text |= {"hidden_size": 384, "intermediate_size": 640}
        vision |= {"hidden_size": 320, "intermediate_size": 768}
    else:
        text |= PRESETS["7b"] | {"vocab_size": 512, "num_hidden_layers": 2}
        vision = MODELS["llava-7b"]["vision_config"] | vision
    return LlavaConfig.from_hf(testing.tiny_hf_config(vision=vision, text=text))


def copies(name, program, answers=True, weights="full"):
    """Returns the copies of weights in a program that is compiled for a target."""
    target, config = find_target(name), config_of(name)
    replicated = NamedSharding(Mesh(target.devices, "x"), P())

    def place(tree):
        return jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=replicated), tree
        )

    dtype = jnp.bfloat16
    params = vlm.abstract_params(Llava(config), dtype, weights)
    if uses_joined_weights(target.devices[0].platform, None):
        params = jax.eval_shape(join_kernels, params)
    params = place(params)
    side, rows = config.vision.image_size, jax.ShapeDtypeStruct((1,), jnp.int32)
    hidden = jax.ShapeDtypeStruct((1, TOKENS, config.text.hidden_size), dtype)
    sequence = jax.eval_shape(functools.partial(from_embeddings, config), hidden, rows)
    cache = jax.eval_shape(lambda: init_cache(config.text, 2, 1, TOKENS, dtype))
    function, inputs = {
        "tower": (
            lambda params, pixels: Llava(config).encode_image(params, pixels)[0],
            (jax.ShapeDtypeStruct((1, 3, side, side), jnp.uint8),),
        ),
        "prefill": (lambda params, row: vlm.prefill(params, config, row, 3), (sequence,)),
        "decode": (
            lambda params, token, cache: vlm.decode_step(params, config, token, cache),
            (rows, cache),
        ),
    }[program]
    lowered = jit_for_weights(function, (), (), answers).trace(params, *place(inputs)).lower()
    text = target.compile(lowered).as_text()
    part = flatten(params["vision" if program == "tower" else "language"])
    kernels = {leaf.shape[-2:] for path, leaf in part.items() if path.endswith("kernel")}
    return copied_weights(text, kernels)


@pytest.mark.parametrize("program", ["tower", "prefill", "decode"])
@pytest.mark.parametrize("name", ["cpu", "h200", "a6000", "v5e"])
def test_programs_of_an_answer_copy_no_weight(name, program, monkeypatch):
    if name == "cpu":  # The layers of the CPU model are small.
        monkeypatch.setattr(stack, "_LARGE_LAYER_BYTES", 0)
    assert copies(name, program) == ()


@pytest.mark.parametrize("program", ["prefill", "decode"])
@pytest.mark.parametrize("name", ["cpu", "h200", "a6000", "v5e"])
def test_int8_matrices_are_converted_within_their_products(name, program, monkeypatch):
    if name == "cpu":
        monkeypatch.setattr(stack, "_LARGE_LAYER_BYTES", 0)
    assert copies(name, program, weights="int8") == ()


@pytest.mark.parametrize("name", ["cpu", "h200"])
def test_a_scan_copies_every_matrix_of_a_layer(name):
    """This is the reason why layers are unstacked. If the test fails, stacks may be used again."""
    assert len(copies(name, "decode", answers=False)) >= (4 if name == "h200" else 7)
