import jax
import jax.numpy as jnp
import numpy as np
import pytest
from views import select, view

from stepprune_jax.pruning import Grid
from stepprune_jax.pruning.grid import grid_indices


def plain_grid(height, width, budget):
    """The same choice row by row, in plain numpy."""
    lines = min(
        max(round((budget * height / width) ** 0.5), -(-budget // width), 1), height, budget
    )
    chosen = []
    for line in range(lines):
        count = budget * (line + 1) // lines - budget * line // lines
        row = (2 * line + 1) * height // (2 * lines)
        places = (2 * np.arange(count) + 1) * width
        columns = places // (2 * count) if line % 2 == 0 else -(-places // (2 * count)) - 1
        chosen.append(row * width + columns)
    return np.concatenate(chosen)


compiled = jax.jit(grid_indices, static_argnums=2)


def indices(grids, counts, capacity):
    return np.asarray(compiled(jnp.asarray(grids), jnp.asarray(counts), capacity))


@pytest.mark.parametrize(
    ("grid", "count", "expected"),
    [
        # Two rows of two; the columns halfway between two are taken right, then left.
        ((4, 4), 4, [5, 7, 12, 14]),
        ((3, 3), 1, [4]),
        ((2, 3), 6, [0, 1, 2, 3, 4, 5]),
    ],
)
def test_small_grids_worked_by_hand(grid, count, expected):
    assert plain_grid(*grid, count).tolist() == expected
    assert indices([grid], [count], count)[0].tolist() == expected


@pytest.mark.parametrize("grid", [(12, 12), (3, 3), (2, 7), (24, 24), (9, 1), (7, 13)])
def test_every_budget_equals_the_plain_formula(grid):
    n = grid[0] * grid[1]
    counts = np.arange(1, n + 1)
    chosen = indices(np.tile(grid, (n, 1)), counts, n)
    for count in counts:
        index = chosen[count - 1, :count]
        np.testing.assert_array_equal(index, plain_grid(*grid, int(count)))
        assert (np.diff(index) > 0).all() and index[0] >= 0 and index[-1] < n


def test_the_tokens_of_the_grid_are_kept():
    seen = view(np.arange(9.0)[None, :, None], count=4, grid=[[3, 3]])
    kept = select(Grid(), seen, 9)
    assert kept.index[0].tolist() == [*plain_grid(3, 3, 4), *[-1] * 5]
