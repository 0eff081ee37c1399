"""Mentions of questions: their file, their positions in the packed tokens, and their loss."""

import itertools
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from experiments.pretrain.conversations import Sample
from experiments.pretrain.mentions import (
    Mentions,
    PlacedMentions,
    init_mention_heads,
    mention_loss,
    place_mentions,
    read_mentions,
)
from experiments.pretrain.packing import pack
from experiments.pretrain.small_llava import TEMPLATE
from experiments.pretrain.vocabulary import build_tokenizer
from experiments.shapes import write_world
from experiments.shapes.questions import FAMILIES, NUMBERS
from experiments.shapes.world import scene_at
from stepprune_jax.testing import llava_encoder

# Slow: shipped models are already trained, so these tests run only when pretraining changes.
pytestmark = pytest.mark.slow

TURNS = ("Is the cup left of the cup?", "yes", "Where is the cup?", "here")
ROWS = Mentions(
    np.array([0, 0, 0]),
    np.array([0, 0, 1]),
    np.array(["cup", "cup", "cup"]),
    np.array([1, 1, 3]),
    np.array([[0.0], [2.0], [np.nan]], np.float32),
)


def test_mentions_are_found_in_the_order_of_the_words():
    tokenizer = build_tokenizer(TURNS, TEMPLATE)
    sample = Sample(pathlib.Path("a.png"), TURNS, 0)
    packed = pack(llava_encoder(tokenizer), [sample])
    positions = place_mentions(tokenizer, packed, ROWS)
    # is the cup left of the cup ? assistant : yes </s> where is the cup
    assert positions.slot.tolist() == [[2, 6, 15]]
    assert positions.number.tolist() == [[1, 1, 3]]
    np.testing.assert_array_equal(positions.value, [[[-1], [1], [np.nan]]])
    cup = tokenizer.convert_tokens_to_ids("cup")
    assert packed.ids[0, positions.slot[0]].tolist() == [cup] * 3
    # Truncated questions have no mentions.
    truncated = pack(llava_encoder(tokenizer), [sample], token_limit=12)
    assert place_mentions(tokenizer, truncated, ROWS).slot.tolist() == [[2, 6]]


@pytest.mark.parametrize(
    "change",
    [
        {"word": np.array(["cup", "cup"])},
        {"sample": np.array([0, 0, 1])},
        {"exchange": np.array([1, 0, 1])},
        {"number": np.array([1, -1, 3])},
    ],
)
def test_invalid_mentions_are_refused(tmp_path, change):
    file = tmp_path / "train_mentions.npz"
    np.savez(file, **ROWS._asdict())
    assert read_mentions(file, 1).word.tolist() == ["cup"] * 3
    np.savez(file, **ROWS._asdict() | change)
    with pytest.raises(ValueError, match=r"train_mentions\.npz: expected "):
        read_mentions(file, 1)


def test_the_mention_loss_matches_a_worked_example():
    positions = PlacedMentions(
        jnp.zeros((1, 3), int), jnp.array([[0, 1, -1]]), jnp.array([[[2.0], [np.nan], [np.nan]]])
    )
    heads = init_mention_heads(positions, 2)
    assert heads["number"].shape == (3, 2) and heads["value"].shape == (3, 1)
    # Only biases: numbers with odds of 3 to 1, and values of 0.5.
    heads = {
        "number": heads["number"].at[2].set(jnp.array([np.log(3.0), 0])),
        "value": heads["value"].at[2].set(0.5),
    }
    hidden = jax.random.normal(jax.random.key(0), (1, 3, 2))
    loss, scalars = jax.jit(mention_loss)(heads, hidden, positions)
    # (-ln 3/4 - ln 1/4) / 2 = .83699, and (2 - .5)^2 = 2.25 of a single value
    np.testing.assert_allclose(loss, 0.83699 + 2.25 / 3, rtol=1e-5)
    assert scalars["mention_number"] == 0.5 and scalars["mention_error"] == 1.5
    grads = jax.jit(jax.grad(lambda states: mention_loss(heads, states, positions)[0]))(hidden)
    assert np.isfinite(grads).all() and (grads[0, 2] == 0).all()


def test_mentions_of_the_world_match_the_questions_and_answers(tmp_path):
    folder = write_world(tmp_path / "w", seed=3, train=40, validation=0, test=0, patches=True)
    mentions = read_mentions(folder / "train_mentions.npz", 40)
    families = set()
    queries = [scene_at(3, "train", number)[1] for number in range(40)]
    for number, exchange in itertools.product(range(40), range(min(map(len, queries)))):
        query = queries[number][exchange]
        rows = (mentions.sample == number) & (mentions.exchange == exchange)
        words = query.text.lower().rstrip("?").split()
        assert [word for word in words if word in mentions.word[rows]] == mentions.word[
            rows
        ].tolist()
        families |= {query.family} if rows.any() else set()
        if query.family == "counting":
            assert [NUMBERS[n] for n in mentions.number[rows]] == [query.answer]
        if query.family == "relation":
            axis = int("above" in query.text)
            first, second = mentions.value[rows][:, axis]
            assert (
                query.answer == (("left", "right"), ("above", "below"))[axis][int(first > second)]
            )
        if query.family == "size":
            first, second = mentions.value[rows][:, 2]
            assert query.answer == ("yes" if first > second else "no")
    assert families == set(FAMILIES) - {"majority", "background"}
