"""A ranking serves every budget: its prefixes are the choices at each of them."""

import functools

import hypothesis
import hypothesis.strategies as st
import jax
import numpy as np
import pytest
from quick import quick_or_slow
from small_world import one_shot, stepprune
from views import select, view

from stepprune_jax.pruning import CDPruner, Cls, DivPrune, Evs, MMTok, Random, Ranker
from stepprune_jax.registry import PRUNERS
from stepprune_jax.selectors import VisionSelector, VisionSelectorConfig

N, ROWS = 16, 5
RANKERS = {
    "random": Random,
    "cls": Cls,
    "divprune": DivPrune,
    "cdpruner": CDPruner,
    "cdpruner in halves": functools.partial(CDPruner, split_threshold=6),
    "mmtok": MMTok,
    "autoselect": one_shot,
    "evs": Evs,
    "autoselect with diversity": lambda: one_shot().replace(diversity=0.5),
    "visionselector": lambda: VisionSelector.init(
        jax.random.key(3), VisionSelectorConfig(32, hidden_dim=8), None
    ),
    "stepprune": functools.partial(stepprune, max_steps=N),
    "stepprune in groups": lambda: stepprune(max_steps=N).replace(group=3, draw=0.0),
}


def test_every_ranker_is_tested():
    names = {name for name, kind in PRUNERS.items() if issubclass(kind, Ranker)}
    assert names == {make().name for make in RANKERS.values()}


def one_grid(random):
    """LLaVA-1.5: all images have the same tokens."""
    return np.full(ROWS, N), np.zeros((ROWS, N), bool), np.zeros((ROWS, N), int)


def sizes_vary(random):
    """Qwen2.5-VL and Qwen3-VL: the images of a batch have different sizes."""
    return random.integers(1, N + 1, ROWS), np.zeros((ROWS, N), bool), np.zeros((ROWS, N), int)


def tiles(random):
    """LLaVA-NeXT: a row of the tiles ends with a vector of zeros, which belongs to no tile."""
    size, place = random.integers(8, N + 1, ROWS)[:, None], np.arange(N)
    columns = random.integers(2, 5, ROWS)[:, None]
    ends = (place >= 4) & ((place - 4) % columns == columns - 1) & (place < size)
    return size[:, 0], ends, np.where(ends, -1, np.minimum(place // 4, 2))


FAMILIES = {"one grid": one_grid, "sizes vary": sizes_vary, "tiles": tiles}


def random_view(pruner, random, family):
    """Random images of a family, each with a random number of tokens to keep."""
    size, zeros, tile = FAMILIES[family](random)
    tokens = random.standard_normal((ROWS, N, 32)).astype(np.float32)
    tokens[zeros] = 0
    tokens[np.arange(N) >= size[:, None]] = 7  # anything
    text = random.standard_normal((ROWS, 2, 48 if pruner.config_type else 32)).astype(np.float32)
    attention = random.random((ROWS, 2, N + 1)).astype(np.float32)
    hidden = random.standard_normal((ROWS, N + 1, 24)).astype(np.float32)
    shares = {"cls": (attention, tile), "cdpruner": (tile,), "mmtok": (hidden, tile)}
    return view(
        tokens,
        *shares.get(pruner.name, ()),
        count=random.integers(1, size + 1),
        text=text,
        text_valid=np.ones((ROWS, 2), bool),
        seed=random.integers(0, 9, ROWS).astype(np.uint32),
        valid=np.arange(N) < size[:, None],
    )


# Compiled once for each method: another stop bias, or other counts, make no new program.
rank = jax.jit(lambda pruner, view, steps: pruner.rank(view, steps), static_argnames="steps")
SLOW = ("cdpruner in halves", "stepprune in groups")


@pytest.mark.parametrize("name", quick_or_slow(RANKERS, RANKERS.keys() - {*SLOW}))
def test_prefixes_of_a_ranking_are_the_choices_at_each_budget(name):
    pruner = RANKERS[name]().with_budget(4).program()

    @hypothesis.settings(max_examples=12)
    @hypothesis.given(seed=st.integers(0, 1 << 30), family=st.sampled_from(sorted(FAMILIES)))
    def holds(seed, family):
        inputs = random_view(pruner, np.random.default_rng(seed), family)
        ranked, kept = rank(pruner, inputs, N).order, select(pruner, inputs, N)
        for row, count in enumerate(inputs.count.tolist()):
            chosen = kept.order[row, :count].tolist()
            assert kept.count[row] == count == len(set(chosen)) and -1 not in chosen
            assert ranked[row, :count].tolist() == chosen

    holds()


def test_a_learned_stop_keeps_the_same_tokens_by_a_ranking():
    random, kept_of_all = np.random.default_rng(0), []
    for family in FAMILIES:
        for bias in (-1000.0, 0.5):
            policy = stepprune(min_tokens=2).replace(stop_bias=bias)
            inputs = random_view(policy, random, family)
            ranking, kept = rank(policy, inputs, N // 2), select(policy, inputs, N // 2)
            counts = np.asarray(policy.counts(ranking, np.asarray(inputs.valid.sum(1))))
            assert counts.tolist() == kept.count.tolist(), family
            for row, count in enumerate(counts):
                assert ranking.order[row, :count].tolist() == kept.order[row, :count].tolist()
            kept_of_all += counts.tolist()
    assert len({*kept_of_all}) > 3


def test_the_most_tokens_are_half_of_those_that_are_not_zeros():
    """A row of 16 tokens, 4 of which are zeros, keeps 6: in `generate` and by a ranking."""
    policy = stepprune(min_tokens=2).replace(stop_bias=-1000.0)
    inputs = random_view(policy, np.random.default_rng(0), "one grid")
    inputs = inputs._replace(tokens=inputs.tokens.at[:, 3::4].set(0))
    assert select(policy, inputs, 8).count.tolist() == [6] * ROWS
    counts = policy.counts(rank(policy, inputs, 8), np.full(ROWS, N))
    assert counts.tolist() == [6] * ROWS
