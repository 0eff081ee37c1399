import numpy as np
import pytest
from views import select, view

from stepprune_jax.pruning import Downsample


def pooled(tokens, grid, count, capacity=None, **others):
    """What is made of one image of tokens [n, d], or of rows of them."""
    tokens = np.asarray(tokens, np.float32)
    rows = tokens if tokens.ndim == 3 else tokens[None]
    grids = np.broadcast_to(np.asarray(grid, np.int32), (len(rows), 2))
    return select(
        Downsample(),
        view(rows, count=count, grid=grids, **others),
        int(np.max(count)) if capacity is None else capacity,
    )


def test_two_rows_of_three_become_two_by_two():
    # Each cell is a row high and a token and a half wide.
    kept = pooled(np.arange(6.0)[:, None], (2, 3), 4, capacity=5)
    expected = [(0 + 0.5 * 1) / 1.5, (0.5 * 1 + 2) / 1.5, (3 + 0.5 * 4) / 1.5, (0.5 * 4 + 5) / 1.5]
    np.testing.assert_allclose(kept.tokens[0, :, 0], [*expected, 0], rtol=1e-6)
    assert kept.place[0].tolist() == [0, 2, 3, 5, 0]
    assert kept.index[0].tolist() == [-1] * 5
    assert kept.valid[0].tolist() == [True] * 4 + [False] and kept.count.tolist() == [4]


def test_five_cells_of_three_by_three_are_two_above_and_three_below():
    # Bands are a row and a half high: the middle row counts half in each.
    image = np.arange(9.0).reshape(3, 3)
    upper, lower = (image[0] + image[1] / 2) / 1.5, (image[1] / 2 + image[2]) / 1.5
    kept = pooled(image.reshape(9, 1), (3, 3), 5)
    expected = [(upper[0] + upper[1] / 2) / 1.5, (upper[1] / 2 + upper[2]) / 1.5, *lower]
    np.testing.assert_allclose(kept.tokens[0, :, 0], expected, rtol=1e-6)
    assert kept.place[0].tolist() == [0, 2, 6, 7, 8]


def plain(image, count):
    """Means of the cells of an image [h, w, d] of which every token is drawn as many pixels."""
    height, width, _ = image.shape
    lines = max(round((count * height / width) ** 0.5), -(-count // width), 1)
    lines = min(lines, height, count)
    cells = []
    for line in range(lines):
        held = count * (line + 1) // lines - count * line // lines
        drawn = np.repeat(np.repeat(image, lines, axis=0), held, axis=1)
        band = drawn[line * height : (line + 1) * height]
        parts = [band[:, cell * width : (cell + 1) * width] for cell in range(held)]
        cells += [part.mean((0, 1)) for part in parts]
    return np.array(cells)


@pytest.mark.parametrize("grid", [(4, 4), (2, 7), (9, 1), (5, 3)])
def test_every_budget_equals_the_means_of_drawn_cells(grid):
    n = grid[0] * grid[1]
    image = np.random.default_rng(n).standard_normal((*grid, 3), np.float32)
    counts = np.arange(1, n + 1)
    kept = pooled(np.tile(image.reshape(1, n, 3), (n, 1, 1)), grid, counts)
    for count in counts.tolist():
        tokens, place = (np.asarray(x)[count - 1] for x in (kept.tokens, kept.place))
        np.testing.assert_allclose(tokens[:count], plain(image, count), atol=1e-6)
        assert not tokens[count:].any()
        assert (np.diff(place[:count]) > 0).all() and place[count - 1] < n
    np.testing.assert_array_equal(kept.tokens[-1], image.reshape(n, 3))
    np.testing.assert_array_equal(kept.place[-1], np.arange(n))


def test_images_differ_in_size_and_padding_is_not_read():
    random = np.random.default_rng(0)
    grids, counts = [(3, 4), (2, 3), (1, 2)], np.array([5, 4, 1])
    valid = np.arange(12) < np.prod(grids, axis=1)[:, None]
    tokens = random.standard_normal((3, 12, 2), np.float32)
    kept = pooled(np.where(valid[..., None], tokens, np.nan), grids, counts, valid=valid)
    for row, (grid, count) in enumerate(zip(grids, counts.tolist(), strict=True)):
        image = tokens[row, : np.prod(grid)].reshape(*grid, 2)
        np.testing.assert_allclose(kept.tokens[row, :count], plain(image, count), atol=1e-6)
        assert not np.asarray(kept.tokens)[row, count:].any()
