import functools

import jax
import jax.numpy as jnp
import numpy as np
import prompts
import pytest
from hf_reference import assert_close, llava_pair

from stepprune_jax.models import decoder as llama
from stepprune_jax.models import vlm
from stepprune_jax.models.layers import Tap

ANSWER = [[33, 34, 35], [36, 37, 38], [39, 40, 41], [43, 44, 45], [46, 47, 48]]

prefill = jax.jit(vlm.prefill, static_argnums=(1, 3), static_argnames=("all_logits",))
decode_step = jax.jit(vlm.decode_step, static_argnums=1)


@pytest.fixture(scope="module")
def llava():
    return llava_pair()


def prefix(params, config, positions="original"):
    return prompts.assemble(params, config, *prompts.batch(), positions=positions)


@pytest.mark.parametrize("positions", vlm.POSITIONS)
def test_cached_decode_equals_recomputation_without_a_cache(llava, positions):
    model, config, params = llava
    logits, cache, *_ = prefill(params, config, prefix(params, config, positions), 3)
    steps = [logits]
    for step in range(3):
        logits, cache = decode_step(params, config, jnp.array(ANSWER)[:, step], cache)
        steps.append(logits)
    for row, answer in enumerate(ANSWER):
        theirs = prompts.torch_logits(model, row, positions, answer)[-4:]
        ours = jnp.stack([logits[row] for logits in steps])
        assert_close(ours, theirs, what=f"row {row}")


def test_the_cache_holds_kept_tokens_only(llava):
    _, config, params = llava
    sequence = prefix(params, config)
    cache = prefill(params, config, sequence, 3).cache
    np.testing.assert_array_equal(cache.length, sequence.length)
    kept = [
        len(row) + sum(map(len, images)) - row.count(vlm.IMAGE_TOKEN)
        for row, images in zip(prompts.ROWS, prompts.KEPT, strict=True)
    ]
    np.testing.assert_array_equal(cache.length, kept)
    slots = sequence.hidden.shape[1] + 3
    assert cache.key.shape == (4, 5, 2, slots, 16)
    # Slots behind a row's length are never read.
    behind = jnp.arange(slots) >= cache.length[:, None]
    spoilt = [jnp.where(behind[None, :, None, :, None], 1e4, x) for x in cache[:2]]
    token = jnp.array([3, 4, 5, 6, 7])
    ours, _ = decode_step(params, config, token, cache._replace(key=spoilt[0], value=spoilt[1]))
    plain, _ = decode_step(params, config, token, cache)
    assert_close(ours, plain, 1e-6)


def test_a_token_beyond_the_capacity_leaves_earlier_slots_alone(llava):
    _, config, params = llava
    sequence = prompts.assemble(params, config, *prompts.batch([3]), capacity=8)
    cache = prefill(params, config, sequence, 0).cache
    _, full = decode_step(params, config, jnp.array([3]), cache)
    np.testing.assert_array_equal(full.key, cache.key)


@functools.partial(jax.jit, static_argnums=(1, 7, 8))
def stage(params, config, hidden, position, valid, cache, query_index, span, capacity):
    taps = [Tap("attention", span[0]), Tap("keys", span[1] - 1), Tap("hidden", span[1])]
    rows, wanted = llama.Rows(hidden, position, valid), llama.Wanted(capacity, taps, query_index)
    return vlm.run_layers(params, config, rows, span, cache, wanted)


def test_stages_one_after_the_other_equal_the_whole(llava):
    _, config, params = llava
    hidden, position, length, *_ = prefix(params, config)
    valid = jnp.arange(hidden.shape[1]) < length[:, None]
    rows = (length - 1)[:, None]
    whole = stage(params, config, hidden, position, valid, None, rows, (0, 4), 40)
    parts = []
    for span in ((0, 1), (1, 4)):
        parts.append(stage(params, config, hidden, position, valid, None, rows, span, 40))
        hidden = parts[-1].hidden
        np.testing.assert_array_equal(parts[-1].taps[f"hidden.{span[1]}"], hidden)
    assert_close(hidden, whole.hidden)
    for name in ("key", "value"):
        together = jnp.concatenate([getattr(part.cache, name) for part in parts])
        assert_close(together, getattr(whole.cache, name))
    np.testing.assert_array_equal(parts[1].cache.length, whole.cache.length)
    assert_close(parts[0].taps["attention.0"], whole.taps["attention.0"])
    assert_close(parts[1].taps["keys.3"], whole.taps["keys.3"])


def test_several_tokens_may_be_appended_at_once(llava):
    _, config, params = llava
    sequence = prefix(params, config)
    cache = prefill(params, config, sequence, 4).cache
    tokens = jnp.array(ANSWER)
    position = cache.next_position[:, None, None] + jnp.arange(3)
    rows = jnp.full((5, 1), 2)
    together = stage(
        params,
        config,
        vlm.embed_text(params, config, tokens),
        position,
        jnp.ones((5, 3), bool),
        cache,
        rows,
        (0, 4),
        None,
    )
    one_by_one = cache
    for step in range(3):
        logits, one_by_one = decode_step(params, config, tokens[:, step], one_by_one)
    assert_close(vlm.logits(params, config, together.hidden[:, 2]), logits)
    jax.tree.map(assert_close, together.cache, one_by_one)
    # Rows of attention over the cache and the new tokens together.
    attention = together.taps["attention.0"]
    assert attention.shape == (5, 4, 1, cache.key.shape[3] + 3)
    np.testing.assert_allclose(attention.sum(-1), 1, rtol=1e-5)


def test_dropping_tokens_between_stages_equals_masking_them(llava):
    """Prefill and decode of a two-stage run against one run that hides the dropped keys."""
    _, config, params = llava
    boundary, s = 2, 8
    hidden = vlm.embed_text(params, config, jnp.array([prompts.ROWS[3]]))
    position, valid = jnp.arange(s)[None, None], jnp.ones((1, s), bool)
    keep = jnp.array([0, 1, 4, 6, 7])
    rows = jnp.array([[0]])
    early = stage(params, config, hidden, position, valid, None, rows, (0, boundary), s + 2)
    late = stage(
        params,
        config,
        early.hidden[:, keep],
        position[..., keep],
        valid[:, :5],
        None,
        rows,
        (boundary, 4),
        5 + 2,
    )
    caches = (early.cache, late.cache)
    np.testing.assert_array_equal([c.length[0] for c in caches], [8, 5])
    np.testing.assert_array_equal([c.next_position[0] for c in caches], [8, 8])

    masked = jnp.zeros((1, s), bool).at[:, keep].set(True)
    hiding = stage(params, config, early.hidden, position, masked, None, rows, (boundary, 4), None)
    assert_close(late.hidden, hiding.hidden[:, keep])

    logits, caches = decode_step(params, config, jnp.array([50]), caches)
    longer = vlm.embed_text(params, config, jnp.array([[*prompts.ROWS[3], 50]]))
    position, valid = jnp.arange(s + 1)[None, None], jnp.ones((1, s + 1), bool)
    rerun = stage(params, config, longer, position, valid, None, rows, (0, boundary), None)
    masked = jnp.concatenate([masked, jnp.ones((1, 1), bool)], axis=1)
    rerun = stage(params, config, rerun.hidden, position, masked, None, rows, (boundary, 4), None)
    assert_close(logits, vlm.logits(params, config, rerun.hidden[:, -1]))
    np.testing.assert_array_equal([c.length[0] for c in caches], [9, 6])


def test_caches_that_do_not_fit_are_refused(llava):
    _, config, params = llava
    empty = jnp.zeros((3, 1, 2, 4, 16))
    cache = llama.Cache(empty, empty, jnp.array([0]), jnp.array([0]))
    with pytest.raises(ValueError, match="the caches hold 3 layers, the model has 4"):
        vlm.decode_step(params, config, jnp.array([1]), cache)
    one = jnp.zeros((1, 1, 1), jnp.int32)
    rows = llama.Rows(jnp.zeros((1, 1, 64)), one, jnp.ones((1, 1), bool))
    with pytest.raises(ValueError, match=r"the cache holds 3 layers, the stage \[0:2\] 2"):
        vlm.run_layers(params, config, rows, (0, 2), cache)
    with pytest.raises(ValueError, match="give it only where a cache is created"):
        vlm.run_layers(params, config, rows, (0, 3), cache, llama.Wanted(capacity=9))
