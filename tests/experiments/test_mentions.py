"""What questions speak of: the file, its place among the packed tokens, and the loss."""

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

# The models are made and kept; these run when pretraining changes.
pytestmark = pytest.mark.slow

TURNS = ("Is the cup left of the cup?", "yes", "Where is the cup?", "here")
ROWS = Mentions(
    np.array([0, 0, 0]),
    np.array([0, 0, 1]),
    np.array(["cup", "cup", "cup"]),
    np.array([1, 1, 3]),
    np.array([[0.0], [2.0], [np.nan]], np.float32),
)


def test_each_mention_is_found_after_the_one_before():
    tokenizer = build_tokenizer(TURNS, TEMPLATE)
    sample = Sample(pathlib.Path("a.png"), TURNS, 0)
    rows = pack(llava_encoder(tokenizer), [sample])
    placed = place_mentions(tokenizer, rows, ROWS)
    # is the cup left of the cup ? assistant : yes </s> where is the cup
    assert placed.slot.tolist() == [[2, 6, 15]]
    assert placed.number.tolist() == [[1, 1, 3]]
    np.testing.assert_array_equal(placed.value, [[[-1], [1], [np.nan]]])
    cup = tokenizer.convert_tokens_to_ids("cup")
    assert rows.ids[0, placed.slot[0]].tolist() == [cup] * 3
    # Of what does not fit nothing is mentioned.
    short = pack(llava_encoder(tokenizer), [sample], token_limit=12)
    assert place_mentions(tokenizer, short, ROWS).slot.tolist() == [[2, 6]]


@pytest.mark.parametrize(
    "change",
    [
        {"word": np.array(["cup", "cup"])},
        {"sample": np.array([0, 0, 1])},
        {"exchange": np.array([1, 0, 1])},
        {"number": np.array([1, -1, 3])},
    ],
)
def test_labels_of_other_samples_are_refused(tmp_path, change):
    file = tmp_path / "train_mentions.npz"
    np.savez(file, **ROWS._asdict())
    assert read_mentions(file, 1).word.tolist() == ["cup"] * 3
    np.savez(file, **ROWS._asdict() | change)
    with pytest.raises(ValueError, match=r"train_mentions\.npz: expected "):
        read_mentions(file, 1)


def test_the_loss_by_hand():
    placed = PlacedMentions(
        jnp.zeros((1, 3), int), jnp.array([[0, 1, -1]]), jnp.array([[[2.0], [np.nan], [np.nan]]])
    )
    heads = init_mention_heads(placed, 2)
    assert heads["number"].shape == (3, 2) and heads["value"].shape == (3, 1)
    # Biases alone: numbers at odds of 3 to 1, values 0.5.
    heads = {
        "number": heads["number"].at[2].set(jnp.array([np.log(3.0), 0])),
        "value": heads["value"].at[2].set(0.5),
    }
    hidden = jax.random.normal(jax.random.key(0), (1, 3, 2))
    loss, scalars = jax.jit(mention_loss)(heads, hidden, placed)
    # (-ln 3/4 - ln 1/4) / 2 = .83699, and (2 - .5)^2 = 2.25 of a single value
    np.testing.assert_allclose(loss, 0.83699 + 2.25 / 3, rtol=1e-5)
    assert scalars["mention_number"] == 0.5 and scalars["mention_error"] == 1.5
    grads = jax.jit(jax.grad(lambda h: mention_loss(heads, h, placed)[0]))(hidden)
    assert np.isfinite(grads).all() and (grads[0, 2] == 0).all()


def test_the_worlds_mentions_stand_in_their_questions_and_tell_the_truth(tmp_path):
    folder = write_world(tmp_path / "w", seed=3, train=40, validation=0, test=0, patches=True)
    found = read_mentions(folder / "train_mentions.npz", 40)
    seen = set()
    asked = [scene_at(3, "train", number)[1] for number in range(40)]
    for number, exchange in itertools.product(range(40), range(min(map(len, asked)))):
        query = asked[number][exchange]
        rows = (found.sample == number) & (found.exchange == exchange)
        words = query.text.lower().rstrip("?").split()
        assert [w for w in words if w in found.word[rows]] == found.word[rows].tolist()
        seen |= {query.family} if rows.any() else set()
        if query.family == "counting":
            assert [NUMBERS[n] for n in found.number[rows]] == [query.answer]
        if query.family == "relation":
            axis = int("above" in query.text)
            one, two = found.value[rows][:, axis]
            assert query.answer == (("left", "right"), ("above", "below"))[axis][int(one > two)]
        if query.family == "size":
            one, two = found.value[rows][:, 2]
            assert query.answer == ("yes" if one > two else "no")
    assert seen == set(FAMILIES) - {"majority", "background"}
