"""The memory of a selection among very many tokens, such as a long video, is linear in them."""

import jax
import jax.numpy as jnp
import pytest

from stepprune_jax.policy import Inputs, Limits, PolicyConfig, choose, rank
from stepprune_jax.selectors import StepPrune

WIDTH, NUM_WORDS = 16, 8
CONFIG = PolicyConfig(
    feature_width=WIDTH,
    text_width=WIDTH,
    width=WIDTH,
    num_heads=2,
    encoder_layers=1,
    decoder_layers=1,
    mlp_ratio=1,
)


def temporary_bytes(function, num_tokens, limits):
    """Compiles a selection from the shapes of its inputs, and returns the memory that it plans."""
    params = jax.eval_shape(
        lambda key: StepPrune(config=CONFIG).init_params(key), jax.random.key(0)
    )
    shape = jax.ShapeDtypeStruct
    inputs = Inputs(
        shape((1, num_tokens, WIDTH), jnp.float32),
        shape((1, NUM_WORDS, WIDTH), jnp.float32),
        shape((1, num_tokens), jnp.bool_),
        shape((1, NUM_WORDS), jnp.bool_),
    )
    select = jax.jit(lambda params, inputs: function(params, CONFIG, inputs, limits))
    return select.lower(params, inputs).compile().memory_analysis().temp_size_in_bytes


@pytest.mark.parametrize(
    ("function", "limits"),
    [
        (choose, Limits()),  # a learned stop, up to half of the tokens
        (choose, Limits(group=8)),
        (choose, Limits(budget=1638)),  # a tenth, by tables without pairs of tokens
        (rank, Limits(group=4)),
    ],
    ids=["learned stop", "groups", "budget", "order"],
)
def test_memory_is_linear_in_the_tokens(function, limits, monkeypatch):
    """16,384 tokens need four times the memory of 4,096, and not sixteen times."""
    # Tables of 4,096 tokens are small enough to be built, and would be quadratic.
    monkeypatch.setattr("stepprune_jax.policy.selection.MAX_TABLE_BYTES", 1 << 20)
    small, large = (temporary_bytes(function, count, limits) for count in (4096, 16384))
    assert large < 5 * small
    # The bound of docs/video.md: the encoder's chunks of 128 queries, and arrays of N x width.
    chunks, arrays = 2 * 128 * 16392 * 4, 16392 * WIDTH * 4
    assert large < 4 * chunks + 24 * arrays
