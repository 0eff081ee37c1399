import chex
import jax
import jax.numpy as jnp
import numpy as np
import prompts
import pytest
import torch
from hf_reference import (
    IMAGE_ID,
    NUM_PATCHES,
    as_torch,
    assert_close,
    llava_pair,
    normal,
)
from hypothesis import given, settings
from hypothesis import strategies as st
from visual import visual_of

from stepprune_jax.models import vlm
from stepprune_jax.models.decoder import Wanted
from stepprune_jax.models.layers import Tap

S = vlm.IMAGE_TOKEN
prefill = jax.jit(vlm.prefill, static_argnums=(1, 3), static_argnames=("all_logits",))
encode_image = jax.jit(vlm.encode_image, static_argnums=(1, 3))


@pytest.fixture(scope="module")
def llava():
    return llava_pair()


def prefix(params, config, batch, positions="original", **options):
    return prompts.assemble(params, config, *batch, positions=positions, **options)


@pytest.mark.parametrize("select", ["default", "full"])
def test_llava_with_several_images_equals_the_reference(select):
    model, config, params = llava_pair(vision_feature_select_strategy=select)
    n = config.max_image_tokens
    assert n == NUM_PATCHES + (select == "full")
    pixels = normal(1, 3, 3, 28, 28)
    rows = [[1, S, 4, S, 5, 6], [1, 8, 9, 3, S, 7]]
    images = [[0, 1], [2]]
    features, _ = encode_image(params, config, pixels)
    tokens = vlm.project(params, config, features)
    assert_close(tokens, torch.stack(model.get_image_features(as_torch(pixels)).pooler_output))
    tokens = jnp.stack([tokens[:2], jnp.stack([tokens[2], tokens[0]])])
    visual = visual_of(config, tokens)
    sequence = prompts.assemble(params, config, jnp.array(rows), jnp.array([6, 6]), visual)
    ours = prefill(params, config, sequence, 0, all_logits=True).logits
    for row, (ids, chosen) in enumerate(zip(rows, images, strict=True)):
        expanded = [x for t in ids for x in ([IMAGE_ID] * n if t == S else [t])]
        assert sequence.length[row] == len(expanded) == sequence.next_position[row]
        theirs = model(torch.tensor([expanded]), pixel_values=as_torch(pixels[np.array(chosen)]))
        assert_close(ours[row, : len(expanded)], theirs.logits[0], what=f"row {row}")


def test_assembled_rows_by_hand():
    config = prompts.CONFIG
    # The embedding of token t is (t, t, ...), of kept token i of image a 1000 (a + 1) + i.
    table = jnp.broadcast_to(jnp.arange(96.0)[:, None], (96, 64))
    params = {"language": {"embed": {"embedding": table}}}
    index = jnp.array([[[2, 5, 9], [0, 15, 3]], [[4, 6, 1], [7, 7, 7]]])
    valid = jnp.array([[[1, 1, 0], [1, 1, 1]], [[1, 0, 0], [1, 1, 1]]], bool)
    offset = jnp.array([1000, 2000])[:, None]
    tokens = jnp.broadcast_to((offset + index)[..., None].astype(float), (2, 2, 3, 64))
    visual = visual_of(config, tokens, index, valid)
    ids = jnp.array([[1, S, 8, S, 9], [S, 5, 66, 66, S]])
    length = jnp.array([5, 2])

    def rows(positions, capacity=None):
        return prompts.assemble(params, config, ids, length, visual, positions, capacity)

    # The second sentinel of row 1 lies in the padding, so its second image is not used.
    expected = [[1, 1002, 1005, 8, 2000, 2015, 2003, 9, 0, 0, 0], [1004, 5, *[0] * 9]]
    for positions in vlm.POSITIONS:
        sequence = rows(positions)
        np.testing.assert_array_equal(sequence.hidden[..., 0], expected)
        np.testing.assert_array_equal(sequence.length, [8, 2])
    positions = sequence.position[:, 0]
    np.testing.assert_array_equal(positions, [[*range(8), 0, 0, 0], [0, 1, *[0] * 9]])
    np.testing.assert_array_equal(
        sequence.image, [[-1, 0, 0, -1, 1, 1, 1, -1, -1, -1, -1], [0, *[-1] * 10]]
    )
    np.testing.assert_array_equal(
        sequence.index, [[-1, 2, 5, -1, 0, 15, 3, -1, -1, -1, -1], [4, *[-1] * 10]]
    )
    np.testing.assert_array_equal(sequence.next_position, [8, 2])
    original = rows("original")
    # Row 0: token 1 at 0; the first image owns 1 to 16; token 8 at 17; the second image 18 to 33.
    expected_position = [[0, 3, 6, 17, 18, 33, 21, 34, 0, 0, 0], [4, 16, *[0] * 9]]
    np.testing.assert_array_equal(original.position[:, 0], expected_position)
    np.testing.assert_array_equal(original.next_position, [35, 17])
    cut = rows("original", 5)
    np.testing.assert_array_equal(cut.hidden[..., 0], [r[:5] for r in expected])
    np.testing.assert_array_equal(cut.length, [5, 2])
    np.testing.assert_array_equal(cut.next_position, [19, 17])


def loop_assemble(row, kept, n, positions, capacity):
    """Slots and positions of one row, token by token: (id, -1) or (image, patch)."""
    sources, place, image = [], 0, 0
    for token in row:
        if token != S:
            sources.append(((token, -1), place))
            place += 1
            continue
        if image < len(kept):
            for slot, index in enumerate(kept[image]):
                shift = index if positions == "original" else slot
                sources.append(((image, index), place + shift))
            place += n if positions == "original" else len(kept[image])
        image += 1
    if len(sources) > capacity:
        sources = sources[:capacity]
        place = max(at for _, at in sources) + 1
    return sources, place


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_assembled_rows_equal_a_plain_loop(data):
    config = prompts.CONFIG
    table = jnp.broadcast_to(jnp.arange(96.0)[:, None], (96, 64))
    params = {"language": {"embed": {"embedding": table}}}
    positions = data.draw(st.sampled_from(vlm.POSITIONS))
    capacity = data.draw(st.sampled_from([6, 15]))
    token = st.one_of(st.just(S), st.integers(0, 90))
    rows = [data.draw(st.lists(token, min_size=1, max_size=7)) for _ in range(2)]
    patches = st.lists(st.integers(0, 15), max_size=4, unique=True)
    kept = [[data.draw(patches) for _ in range(2)] for _ in range(2)]
    ids = np.array(
        [
            row + data.draw(st.lists(token, min_size=7 - len(row), max_size=7 - len(row)))
            for row in rows
        ]
    )
    index, valid = np.full((2, 2, 4), 7), np.zeros((2, 2, 4), bool)
    for b, j in np.ndindex(2, 2):
        index[b, j, : len(kept[b][j])] = kept[b][j]
        valid[b, j, : len(kept[b][j])] = True
    visual = np.broadcast_to(
        (1000.0 * (1 + np.arange(2)[:, None]) + index)[..., None], (2, 2, 4, 64)
    ).astype(np.float32)
    lengths = np.array([len(row) for row in rows])
    visual = visual_of(config, visual, index, valid)
    rows_made = prompts.assemble(params, config, ids, lengths, visual, positions, capacity)
    for b in range(2):
        sources, place = loop_assemble(rows[b], kept[b], 16, positions, capacity)
        marks = [t if i < 0 else 1000 * (t + 1) + i for (t, i), _ in sources]
        padding = [0] * (capacity - len(sources))
        np.testing.assert_array_equal(rows_made.hidden[b, :, 5], marks + padding)
        np.testing.assert_array_equal(rows_made.position[b, 0], [at for _, at in sources] + padding)
        assert (rows_made.length[b], rows_made.next_position[b]) == (len(sources), place)


def test_more_sentinels_than_images_vanish_and_rows_without_images_work(llava):
    _, config, params = llava
    none = visual_of(config, np.zeros((1, 0, 3, 64)))
    sequence = prompts.assemble(params, config, jnp.array([[1, S, 2, 3]]), jnp.array([4]), none)
    np.testing.assert_array_equal(sequence.length, [3])
    np.testing.assert_array_equal(sequence.position, [[[0, 1, 2, 0]]])


@pytest.mark.parametrize("positions", vlm.POSITIONS)
def test_pruned_rows_equal_hand_built_reference_runs(llava, positions):
    model, config, params = llava
    sequence = prefix(params, config, prompts.batch(), positions)
    ours = prefill(params, config, sequence, 2, all_logits=True)
    for row in range(len(prompts.ROWS)):
        theirs = prompts.torch_logits(model, row, positions)
        assert sequence.length[row] == len(theirs)
        assert_close(ours.logits[row, : len(theirs)], theirs, what=f"row {row}")
        following = prompts.by_hand(model, row, positions)[2]
        assert ours.cache.next_position[row] == following


def test_a_batch_row_equals_a_batch_of_one_and_padding_changes_nothing(llava):
    _, config, params = llava
    for positions in vlm.POSITIONS:
        sequence = prefix(params, config, prompts.batch(noise=5.0), positions)
        together = prefill(params, config, sequence, 0).logits
        for row in range(len(prompts.ROWS)):
            # Another bucket, more padded ids, and other junk in the padding; two shapes in all.
            extra = 8 + 3 * (row % 2) - len(prompts.ROWS[row])
            alone = prompts.batch([row], bucket=6 + row % 2, extra=extra, noise=-3.0)
            sequence = prefix(params, config, alone, positions)
            ours = prefill(params, config, sequence, 0).logits
            assert_close(ours[0], together[row], what=f"row {row}")


def test_last_logits_are_those_of_each_rows_last_token(llava):
    _, config, params = llava
    sequence = prefix(params, config, prompts.batch([0, 3]))
    every = prefill(params, config, sequence, 0, all_logits=True).logits
    last = prefill(params, config, sequence, 0).logits
    for row in range(2):
        assert_close(last[row], every[row, sequence.length[row] - 1], 1e-6)


def test_prefill_compiles_once_per_bucket(llava):
    _, config, params = llava

    @jax.jit
    @chex.assert_max_traces(n=2)
    def answer(params, batch):
        sequence = vlm.assemble(params, config, *batch)
        return vlm.prefill(params, config, sequence, 4).logits

    full = prompts.batch()
    for bucket in (8, 16):
        for kept in range(8):
            valid = jnp.broadcast_to(jnp.arange(bucket) < kept, (5, 2, bucket))
            batch = prompts.batch(bucket=bucket)
            batch = batch._replace(
                visual=batch.visual._replace(valid=valid),
                text_length=jnp.maximum(full.text_length - kept % 2, 1),
            )
            assert jnp.isfinite(answer(params, batch)).all()


def test_named_intermediates_come_through_the_interface(llava):
    _, config, params = llava
    pixels = normal(1, 1, 3, 28, 28)
    features, taps = encode_image(params, config, pixels, (Tap("attention", -2),))
    assert features.shape == (1, NUM_PATCHES, 32)
    np.testing.assert_allclose(taps["attention.-2"].sum(-1), 1, rtol=1e-5)
    sequence = prefix(params, config, prompts.batch([1, 3]))
    wanted = Wanted(None, (Tap("attention", 1),), (sequence.length - 1)[:, None])
    stage = vlm.run_layers(params, config, sequence.rows, (0, 2), wanted=wanted)
    rows = stage.taps["attention.1"]
    for row in range(2):
        np.testing.assert_allclose(rows[row, ..., : sequence.length[row]].sum(-1), 1, rtol=1e-5)
        np.testing.assert_array_equal(rows[row, ..., sequence.length[row] :], 0)


def test_unknown_position_mode_is_refused(llava):
    _, config, params = llava
    with pytest.raises(ValueError, match="positions is 'dense'; supported: original, compact"):
        prefix(params, config, prompts.batch(), "dense")


def test_initial_weights_have_the_tree_that_checkpoints_give():
    _, config, reference = llava_pair()
    params = vlm.abstract_params(config, jnp.float32)
    assert jax.tree.map(lambda a: (a.shape, a.dtype), params) == jax.tree.map(
        lambda a: (a.shape, a.dtype), reference
    )
    assert {leaf.dtype for leaf in jax.tree.leaves(vlm.abstract_params(config))} == {
        jnp.dtype(jnp.bfloat16)
    }
