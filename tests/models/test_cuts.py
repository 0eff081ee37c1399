"""Visual tokens dropped between layers: rows, lengths and caches of the stages behind a cut."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import prompts
import pytest
from hf_reference import assert_close, llava_pair

from stepprune_jax.models import vlm
from stepprune_jax.models.decoder import Wanted
from stepprune_jax.models.layers import Tap
from stepprune_jax.models.stack import Execution


@pytest.fixture(scope="module")
def llava():
    return llava_pair()[1:]


def kept_slots(number, sequence):
    """Which slots are left at a cut: at the first images lose odd tokens, then those above 6."""
    gone = sequence.index % 2 == 1 if number == 0 else sequence.index > 6
    return ~((sequence.image >= 0) & gone)


def drop(number, sequence, taps):
    """Drops by index, having checked that the taps belong to the rows before the cut."""
    s = sequence.hidden.shape[1]
    rows = taps["attention.0" if number == 0 else "attention.2"]
    assert rows.shape[2:] == ((1, s) if number == 0 else (5, s))
    return sequence, kept_slots(number, sequence)


CUTS = (
    vlm.Cut(1, 20, functools.partial(drop, 0), (Tap("attention", 0), Tap("keys", 0))),
    vlm.Cut(3, 13, functools.partial(drop, 1), (Tap("attention", 2),), 5),
)


@functools.partial(jax.jit, static_argnums=(1, 3))
def prefill_with_cuts(params, config, sequence, execution=Execution()):
    return vlm.prefill(params, config, sequence, 3, CUTS, execution=execution)


@functools.partial(jax.jit, static_argnums=1)
def masked_logits(params, config, sequence):
    """Logits of each row's last kept slot when dropped tokens are hidden, not removed."""
    rows, edges = sequence.rows, (0, *(cut.layer for cut in CUTS), 4)
    for number, span in enumerate(itertools.pairwise(edges)):
        for earlier in range(number):
            rows = rows._replace(valid=rows.valid & kept_slots(earlier, sequence))
        rows = rows._replace(hidden=vlm.run_layers(params, config, rows, span).hidden)
    last = jnp.where(rows.valid, jnp.arange(rows.valid.shape[1]), 0).max(1)
    hidden = jnp.take_along_axis(rows.hidden, last[:, None, None], axis=1)[:, 0]
    return vlm.logits(params, config, hidden)


def append(config, params, sequence, tokens):
    """The rows with tokens [b, t] behind their last one, in rows that are t slots longer."""
    t = tokens.shape[1]
    text = vlm.embed_text(params, config, tokens)

    def one(hidden, position, text, length, following):
        hidden = jnp.pad(hidden, ((0, t), (0, 0)))
        position = jnp.pad(position, ((0, 0), (0, t)))
        at = jnp.broadcast_to(following + jnp.arange(t), (position.shape[0], t))
        hidden = jax.lax.dynamic_update_slice(hidden, text, (length, 0))
        return hidden, jax.lax.dynamic_update_slice(position, at, (0, length))

    hidden, position = jax.vmap(one)(
        sequence.hidden, sequence.position, text, sequence.length, sequence.next_position
    )
    image, index = (
        jnp.pad(part, ((0, 0), (0, t)), constant_values=-1)
        for part in (sequence.image, sequence.index)
    )
    length, following = sequence.length + t, sequence.next_position + t
    return vlm.Sequence(hidden, position, length, following, image, index)


def test_compressed_rows_by_hand():
    hidden = jnp.arange(10.0).reshape(2, 5, 1)
    position = jnp.stack([jnp.arange(5), 10 + jnp.arange(5)])[:, None].astype(jnp.int32)
    image = jnp.array([[-1, 0, 0, 1, -1], [0, 0, -1, -1, -1]], jnp.int32)
    index = jnp.array([[-1, 4, 7, 2, -1], [3, -1, -1, -1, -1]], jnp.int32)
    length, following = jnp.array([5, 3], jnp.int32), jnp.array([5, 13], jnp.int32)
    note = jnp.array([[1, 2, 3, 4, 5], [6, 7, 8, 9, 9]], jnp.float32)
    sequence = vlm.Sequence(hidden, position, length, following, image, index, note)
    # The last kept slot of row 1 lies in its padding, and so is not kept.
    keep = jnp.array([[1, 0, 1, 0, 1], [0, 1, 1, 0, 1]], bool)
    short = vlm.compress(sequence, keep, 4)
    np.testing.assert_array_equal(short.hidden[..., 0], [[0, 2, 4, 0], [6, 7, 0, 0]])
    np.testing.assert_array_equal(short.position[:, 0], [[0, 2, 4, 0], [11, 12, 0, 0]])
    np.testing.assert_array_equal(short.length, [3, 2])
    np.testing.assert_array_equal(short.next_position, [5, 13])
    np.testing.assert_array_equal(short.image, [[-1, 0, -1, -1], [0, -1, -1, -1]])
    np.testing.assert_array_equal(short.index, [[-1, 7, -1, -1], [-1, -1, -1, -1]])
    np.testing.assert_array_equal(short.note, [[1, 3, 5, 0], [7, 8, 0, 0]])
    anew = vlm.renumber(short)
    np.testing.assert_array_equal(anew.position[:, 0], [[0, 1, 2, 0], [0, 1, 0, 0]])
    np.testing.assert_array_equal(anew.next_position, [3, 2])
    np.testing.assert_array_equal(vlm.last_slots(short, 3), [[0, 1, 2], [0, 0, 1]])
    cut = vlm.compress(sequence, keep, 2)
    np.testing.assert_array_equal(cut.hidden[..., 0], [[0, 2], [6, 7]])
    np.testing.assert_array_equal(cut.length, [2, 2])


def test_each_stage_has_its_own_length_and_cache(llava):
    config, params = llava
    sequence = prompts.assemble(params, config, *prompts.batch())
    result = prefill_with_cuts(params, config, sequence)
    kept = jnp.arange(sequence.hidden.shape[1]) < sequence.length[:, None]
    lengths = [sequence.length]
    for number in range(2):
        kept &= kept_slots(number, sequence)
        lengths.append(kept.sum(1))
    assert len({tuple(length.tolist()) for length in lengths}) == 3
    slots = (sequence.hidden.shape[1], 20, 13)
    for cache, layers, length, s in zip(result.cache, (1, 2, 1), lengths, slots, strict=True):
        assert cache.key.shape == (layers, 5, 2, s + 3, 16)
        np.testing.assert_array_equal(cache.length, length)
        np.testing.assert_array_equal(cache.next_position, sequence.next_position)
    # What is left keeps its place in the image and its position ids.
    for row in range(5):
        left = np.flatnonzero(kept[row])
        last = result.cuts[1]
        for name in ("position", "image", "index"):
            whole, short = getattr(sequence, name)[row], getattr(last, name)[row]
            np.testing.assert_array_equal(short[..., : len(left)], whole[..., left])


def test_dropping_equals_masking_the_same_tokens(llava):
    config, params = llava
    sequence = prompts.assemble(params, config, *prompts.batch())
    ours = prefill_with_cuts(params, config, sequence).logits
    masked = masked_logits(params, config, sequence)
    for row in range(5):
        assert_close(ours[row], masked[row], what=f"row {row}")


def test_greedy_decoding_with_the_caches_equals_a_recomputation_without(llava):
    config, params = llava
    sequence = prompts.assemble(params, config, *prompts.batch())
    logits, cache, *_ = prefill_with_cuts(params, config, sequence)
    decode_step = jax.jit(vlm.decode_step, static_argnums=1)
    for _ in range(3):
        token = jnp.argmax(logits, axis=-1)
        logits, cache = decode_step(params, config, token, cache)
        sequence = append(config, params, sequence, token[:, None])
        assert_close(logits, masked_logits(params, config, sequence))
    for stage in cache:
        np.testing.assert_array_equal(stage.next_position, sequence.next_position)


def test_a_cut_that_keeps_all_changes_no_logit(llava):
    config, params = llava
    sequence = prompts.assemble(params, config, *prompts.batch())
    s = sequence.hidden.shape[1]

    def keep_all(sequence, taps):
        assert not taps
        return sequence, jnp.ones(sequence.image.shape, bool)

    @jax.jit
    def run(params, sequence):
        return vlm.prefill(params, config, sequence, 0, cuts=(vlm.Cut(2, s, keep_all),))

    plain = jax.jit(vlm.prefill, static_argnums=(1, 3))(params, config, sequence, 0)
    assert_close(run(params, sequence).logits, plain.logits, 1e-6)
    np.testing.assert_array_equal(run(params, sequence).cuts[0].length, sequence.length)


def test_a_stage_tells_what_the_layer_behind_it_would_attend_to(llava):
    config, params = llava
    sequence = prompts.assemble(params, config, *prompts.batch())
    wanted = Wanted(
        taps=(Tap("attention", 2), Tap("rotary", 0)), query_index=vlm.last_slots(sequence, 2)
    )

    @functools.partial(jax.jit, static_argnums=1)
    def taps(params, last):
        stage = vlm.run_layers(params, config, sequence.rows, (0, last), wanted=wanted)
        return stage.taps

    ahead, inside = taps(params, 2), taps(params, 3)
    np.testing.assert_allclose(ahead["attention.2"], inside["attention.2"], atol=1e-6)
    np.testing.assert_allclose(ahead["attention.2"].sum(-1), 1, atol=1e-5)
    np.testing.assert_allclose(jnp.square(ahead["rotary.0"]).sum(0), 1, atol=1e-6)
    with pytest.raises(ValueError, match=r"tap attention.2 is outside the stage \[0:1\]"):
        taps(params, 1)


def test_merged_tokens_enter_the_layers_behind(llava):
    """A drop function may change what is left: here it doubles the first visual token."""
    config, params = llava
    sequence = prompts.assemble(params, config, *prompts.batch())

    def merge(sequence, taps):
        del taps
        first = (sequence.image == 0) & (sequence.index >= 0)
        first &= jnp.cumsum(first, axis=1) == 1
        hidden = jnp.where(first[..., None], 2 * sequence.hidden, sequence.hidden)
        index = jnp.where(first, -1, sequence.index)
        return sequence._replace(hidden=hidden, index=index), sequence.image != 1

    cut = vlm.Cut(2, sequence.hidden.shape[1], merge)

    @jax.jit
    def run(params, sequence):
        return vlm.prefill(params, config, sequence, 0, cuts=(cut,))

    result, plain = run(params, sequence), jax.jit(vlm.prefill, static_argnums=(1, 3))
    difference = jnp.abs(result.logits - plain(params, config, sequence, 0).logits).max(1)
    # Row 3 has no image, row 4 none that is kept.
    np.testing.assert_array_equal(difference > 1e-3, [True, True, True, False, False])
    after = result.cuts[0]
    assert not (after.image == 1).any()
    assert int(((after.image == 0) & (after.index < 0)).sum()) == 3
