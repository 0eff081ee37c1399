"""Rows of text and kept tokens: assembly, prefill, decode, and dropping between layers."""

import jax
import jax.numpy as jnp
import numpy as np
import prompts
import pytest
import torch
from hf_reference import IMAGE_ID, as_torch, assert_close
from hypothesis import given, settings
from hypothesis import strategies as st
from plain_decoder import loop_assemble
from visual import random_bytes, visual_of

from stepprune_jax.data.prompts import IMAGE_TOKEN
from stepprune_jax.models import vlm
from stepprune_jax.models.llava import Llava
from stepprune_jax.models.sequence import POSITIONS, Sequence, compress, last_slots, renumber

S = IMAGE_TOKEN
ANSWER = jnp.array([[33, 34, 35], [36, 37, 38], [39, 40, 41], [43, 44, 45], [46, 47, 48]])
prefill = jax.jit(vlm.prefill, static_argnums=(1, 3), static_argnames=("all_logits",))
decode_step = jax.jit(vlm.decode_step, static_argnums=1)


def test_llava_with_several_images_equals_the_reference(llava):
    model, config, params = llava
    num_tokens, backbone = config.max_image_tokens, Llava(config)
    pixels = random_bytes(1, 3, 3, 28, 28)
    normalised = as_torch(backbone.normalise(pixels))
    rows = [[1, S, 4, S, 5, 6], [1, 8, 9, 3, S, 7]]
    images = [[0, 1], [2]]
    features, _ = jax.jit(backbone.encode_image)(params, pixels)
    tokens = backbone.project(params, features)
    assert_close(tokens, torch.stack(model.get_image_features(normalised).pooler_output))
    tokens = jnp.stack([tokens[:2], jnp.stack([tokens[2], tokens[0]])])
    lengths, visual = jnp.array([6, 6]), visual_of(config, tokens)
    sequence = prompts.assemble(params, config, jnp.array(rows), lengths, *visual)
    ours = prefill(params, config, sequence, 0, all_logits=True).logits
    for row, (ids, image_numbers) in enumerate(zip(rows, images, strict=True)):
        expanded = [x for t in ids for x in ([IMAGE_ID] * num_tokens if t == S else [t])]
        assert sequence.length[row] == len(expanded) == sequence.next_position[row]
        theirs = model(torch.tensor([expanded]), pixel_values=normalised[image_numbers])
        assert_close(ours[row, : len(expanded)], theirs.logits[0], what=f"row {row}")


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_assembled_rows_equal_a_plain_loop(data):
    # The embedding of token t is (t, t, ...). Token i of image a has the value 1000 (a + 1) + i.
    table = jnp.broadcast_to(jnp.arange(96.0)[:, None], (96, 64))
    params = {"language": {"embed": {"embedding": table}}}
    positions = data.draw(st.sampled_from(POSITIONS))
    capacity = data.draw(st.sampled_from([6, 15]))
    token = st.one_of(st.just(S), st.integers(0, 90))
    rows = [data.draw(st.lists(token, min_size=1, max_size=7)) for _ in range(2)]
    patches = st.lists(st.integers(0, 15), max_size=4, unique=True)
    kept = [[data.draw(patches) for _ in range(2)] for _ in range(2)]
    ids = [row + data.draw(st.lists(token, min_size=7, max_size=7)) for row in rows]  # with padding
    index, valid = np.full((2, 2, 4), 7), np.zeros((2, 2, 4), bool)
    for b, j in np.ndindex(2, 2):
        index[b, j, : len(kept[b][j])] = kept[b][j]
        valid[b, j, : len(kept[b][j])] = True
    token_values = (1000.0 * (1 + np.arange(2)[:, None]) + index)[..., None]
    visual = np.broadcast_to(token_values, (2, 2, 4, 64)).astype(np.float32)
    visual = visual_of(prompts.CONFIG, visual, index, valid)
    ids, lengths = np.array([row[:7] for row in ids]), np.array([len(row) for row in rows])
    sequence = prompts.assemble(
        params, prompts.CONFIG, ids, lengths, *visual, positions=positions, capacity=capacity
    )
    for b in range(2):
        tokens, place = loop_assemble(rows[b], kept[b], 16, positions, capacity)
        assert (sequence.length[b], sequence.next_position[b]) == (len(tokens), place)
        tokens += [(0, -1, -1, 0)] * (capacity - len(tokens))
        actual = (
            sequence.hidden[b, :, 5],
            sequence.image[b],
            sequence.index[b],
            sequence.position[b, 0],
        )
        np.testing.assert_array_equal(np.stack(actual, axis=1), tokens)


@pytest.mark.parametrize("positions", POSITIONS)
def test_pruned_rows_and_cached_decode_equal_the_reference(llava, positions):
    model, config, params = llava
    # The padding contains noise, and each row equals a separate run of the reference.
    batch = prompts.batch(noise=5.0)
    sequence = prompts.assemble(params, config, *batch, positions=positions)
    all_logits = prefill(params, config, sequence, 3, all_logits=True).logits
    logits, cache, *_ = prefill(params, config, sequence, 3)
    np.testing.assert_array_equal(cache.length, sequence.length)
    steps = [logits]
    for step in range(3):
        logits, cache = decode_step(params, config, ANSWER[:, step], cache)
        steps.append(logits)
    for row, answer in enumerate(ANSWER.tolist()):
        theirs = prompts.torch_logits(model, row, positions, answer)
        length = len(theirs) - 3
        assert sequence.length[row] == length
        assert sequence.next_position[row] == prompts.by_hand(model, row, positions)[2]
        assert_close(all_logits[row, :length], theirs[:length], what=f"row {row}")
        ours = jnp.stack([logits[row] for logits in steps])
        assert_close(ours, theirs[-4:], what=f"answer {row}")


# Visual tokens dropped between layers.


def test_compressed_and_renumbered_rows_equal_rows_written_by_hand():
    hidden = jnp.arange(10.0).reshape(2, 5, 1)
    position = jnp.stack([jnp.arange(5), 10 + jnp.arange(5)])[:, None].astype(jnp.int32)
    image = jnp.array([[-1, 0, 0, 1, -1], [0, 0, -1, -1, -1]], jnp.int32)
    index = jnp.array([[-1, 4, 7, 2, -1], [3, -1, -1, -1, -1]], jnp.int32)
    length, next_position = jnp.array([5, 3], jnp.int32), jnp.array([5, 13], jnp.int32)
    note = jnp.array([[1, 2, 3, 4, 5], [6, 7, 8, 9, 9]], jnp.float32)
    sequence = Sequence(hidden, position, length, next_position, image, index, note)
    # The last kept slot of row 1 is padding, which is dropped.
    keep = jnp.array([[1, 0, 1, 0, 1], [0, 1, 1, 0, 1]], bool)
    compressed = jax.jit(compress, static_argnums=2)
    shortened = compressed(sequence, keep, 4)
    np.testing.assert_array_equal(shortened.hidden[..., 0], [[0, 2, 4, 0], [6, 7, 0, 0]])
    np.testing.assert_array_equal(shortened.position[:, 0], [[0, 2, 4, 0], [11, 12, 0, 0]])
    np.testing.assert_array_equal(shortened.length, [3, 2])
    np.testing.assert_array_equal(shortened.next_position, [5, 13])
    np.testing.assert_array_equal(shortened.image, [[-1, 0, -1, -1], [0, -1, -1, -1]])
    np.testing.assert_array_equal(shortened.index, [[-1, 7, -1, -1], [-1, -1, -1, -1]])
    np.testing.assert_array_equal(shortened.note, [[1, 3, 5, 0], [7, 8, 0, 0]])
    renumbered = renumber(shortened)
    np.testing.assert_array_equal(renumbered.position[:, 0], [[0, 1, 2, 0], [0, 1, 0, 0]])
    np.testing.assert_array_equal(renumbered.next_position, [3, 2])
    np.testing.assert_array_equal(last_slots(shortened, 3), [[0, 1, 2], [0, 0, 1]])
    np.testing.assert_array_equal(compressed(sequence, keep, 2).length, [2, 2])
