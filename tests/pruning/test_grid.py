import numpy as np
from views import select, view

from stepprune_jax.pruning import Grid


def plain_grid(height, width, budget):
    """The same choice row by row, in plain numpy."""
    lines = max(round((budget * height / width) ** 0.5), -(-budget // width), 1)
    lines = min(lines, height, budget)
    chosen = []
    for line in range(lines):
        count = budget * (line + 1) // lines - budget * line // lines
        row = (2 * line + 1) * height // (2 * lines)
        places = (2 * np.arange(count) + 1) * width
        columns = places // (2 * count) if line % 2 == 0 else -(-places // (2 * count)) - 1
        chosen.append(row * width + columns)
    return np.concatenate(chosen)


def kept(grids, counts):
    tokens = np.zeros((len(grids), int(np.prod(grids, axis=1).max()), 1))
    return np.asarray(select(Grid(), view(tokens, count=counts, grid=grids), tokens.shape[1]).index)


def test_columns_halfway_between_two_are_taken_right_then_left():
    assert kept([(4, 4)], 4)[0, :4].tolist() == [5, 7, 12, 14]


def test_every_budget_equals_the_plain_formula():
    shapes = [(12, 12), (3, 3), (2, 7), (9, 1), (7, 13)]
    cases = [(grid, count + 1) for grid in shapes for count in range(grid[0] * grid[1])]
    grids, counts = map(np.array, zip(*cases, strict=True))
    for (grid, count), index in zip(cases, kept(grids, counts), strict=True):
        assert index[:count].tolist() == plain_grid(*grid, count).tolist()
        assert (np.diff(index[:count]) > 0).all() and index[0] >= 0
        assert index[count - 1] < grid[0] * grid[1] and (index[count:] == -1).all()
