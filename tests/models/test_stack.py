"""Layers run as a scan over stacked weights, and written out where their weights lie apart."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import prompts
import pytest
from hf_reference import normal

from stepprune_jax.models import decoder, vlm
from stepprune_jax.models.attention import Tap
from stepprune_jax.models.decoder import Requested
from stepprune_jax.models.llava import Llava
from stepprune_jax.models.stack import lay_out, layout_of


@functools.partial(jax.jit, static_argnums=1)
def answer(params, config, pixels, sequence):
    """All that is run in layers: tower, a stage with taps, stages with a cut, a decoded token."""
    taps = (Tap("hidden", -3), Tap("attention", 1))
    seen = Llava(config).encode_image(params, pixels, taps)
    wanted = Requested(None, (Tap("hidden", 1), Tap("keys", 2)))
    stage = decoder.run_layers(params["language"], config.text, sequence.rows, (0, 4), None, wanted)

    def drop(rows, taps):
        attended = (taps["attention.0"] * taps["scores.2"]).sum((1, 2)) > 0
        return rows, attended & ((rows.image < 0) | (rows.index % 2 == 0))

    cuts = (vlm.Cut(2, 20, drop, (Tap("attention", 0), Tap("scores", 2))),)
    pruned = vlm.prefill(params, config, sequence, 2, cuts)
    token = jnp.argmax(pruned.logits, -1)
    return seen, stage, pruned, vlm.decode_step(params, config, token, pruned.cache)


def test_layers_apart_give_what_stacked_ones_do_with_taps_cuts_and_caches(llava):
    _, config, params = llava
    sequence = prompts.assemble(params, config, *prompts.batch())
    apart, pixels = lay_out(params, "apart"), normal(1, 2, 3, 28, 28)
    stacked = answer(params, config, pixels, sequence)
    assert int(stacked[2].cuts[0].length.sum()) < int(sequence.length.sum())
    close = functools.partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-5)
    jax.tree.map(close, answer(apart, config, pixels, sequence), stacked)


def test_large_layers_lie_apart_unless_told_otherwise():
    def layout(width, layout="auto"):
        kernel = jax.ShapeDtypeStruct((2, width, 2048), jnp.bfloat16)
        params = {"a": {"layers": {"kernel": kernel}}, "b": {"layers": {"bias": kernel}}}
        return layout_of(jax.eval_shape(lambda params: lay_out(params, layout), params))

    assert layout(8192) == "apart"  # 32 MiB
    assert (layout(8191), layout(8192, "stacked")) == ("stacked", "stacked")
    with pytest.raises(ValueError, match="layers is 'loop', expected one of auto, stacked, apart"):
        lay_out({}, "loop")
