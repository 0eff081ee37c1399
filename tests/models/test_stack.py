"""Layers run as a scan and written out: the same results, chosen by the platform."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import prompts
import pytest
from hf_reference import llava_pair, normal

from stepprune_jax.models import vlm
from stepprune_jax.models.decoder import Wanted
from stepprune_jax.models.layers import Tap
from stepprune_jax.models.stack import LAYERS, Execution, run_stack, take_layer


@pytest.fixture(scope="module")
def llava():
    return llava_pair()[1:]


@functools.partial(jax.jit, static_argnums=(1, 4))
def answer(params, config, pixels, sequence, execution):
    """All that is run in layers: tower, a stage with taps, stages with a cut, a decoded token."""
    taps = (Tap("hidden", -3), Tap("attention", 1))
    seen = vlm.encode_image(params, config, pixels, taps, execution)
    wanted = Wanted(None, (Tap("hidden", 1), Tap("keys", 2)))
    stage = vlm.run_layers(params, config, sequence.rows, (0, 4), None, wanted, execution)

    def drop(rows, taps):
        seen = taps["attention.0"].sum((1, 2)) > 0
        return rows, seen & ((rows.image < 0) | (rows.index % 2 == 0))

    cuts = (vlm.Cut(2, 20, drop, (Tap("attention", 0),)),)
    pruned = vlm.prefill(params, config, sequence, 2, cuts, execution=execution)
    token = jnp.argmax(pruned.logits, -1)
    decoded = vlm.decode_step(params, config, token, pruned.cache, execution)
    return seen, stage, pruned, decoded


def test_a_loop_equals_a_scan_with_taps_cuts_and_caches(llava):
    config, params = llava
    sequence = prompts.assemble(params, config, *prompts.batch())
    inputs = (params, config, normal(1, 2, 3, 28, 28), sequence)
    scanned = answer(*inputs, Execution(layers="scan"))
    assert int(scanned[2].cuts[0].length.sum()) < int(sequence.length.sum())
    close = functools.partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-5)
    for layers in ("loop", "auto"):
        jax.tree.map(close, answer(*inputs, Execution(layers=layers)), scanned)


@pytest.mark.parametrize(
    ("layers", "platform", "looped"),
    [
        ("auto", "cpu", False),
        ("auto", "cuda", True),
        ("auto", "tpu", True),
        ("scan", "cuda", False),
        ("loop", "cpu", True),
    ],
)
def test_the_platform_that_is_compiled_for_decides(layers, platform, looped):
    stack = jnp.arange(12.0).reshape(3, 2, 2)

    def run(x, stack):
        return run_stack(lambda x, i: (x @ take_layer(stack, i), None), x, (0, 3), layers=layers)[0]

    traced = jax.jit(run).trace(jnp.ones((2, 2)), stack)
    text = traced.lower(lowering_platforms=(platform,)).as_text()
    assert ("stablehlo.while" not in text) == looped
    assert (text.count("stablehlo.dot_general") == 3) == looped


def test_blocks_by_hand():
    """Each block appends its number; block 2 is watched, the carry before 1 and 4 is wanted."""

    def body(carry, index):
        return carry * 10 + index, carry

    for layers in LAYERS:
        carry, seen, before = run_stack(body, jnp.int32(9), (1, 4), (2,), (1, 4), layers=layers)
        assert int(carry) == 9123
        assert {k: int(v) for k, v in seen.items()} == {2: 91}
        assert {k: int(v) for k, v in before.items()} == {1: 9, 4: 9123}


@pytest.mark.parametrize(
    ("field", "message"),
    [
        ({"attention": "flash"}, "attention is 'flash'; supported: matmul, xla, cudnn"),
        ({"layers": "unroll"}, "layers is 'unroll'; supported: auto, scan, loop"),
    ],
)
def test_what_cannot_be_run_is_refused(field, message):
    with pytest.raises(ValueError, match=message):
        Execution(**field)


def test_how_layers_are_run_is_static():
    assert hash(Execution()) == hash(Execution(layers="auto")) and Execution() == Execution()
    assert Execution() != Execution(remat=True)
