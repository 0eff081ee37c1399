import jax
import numpy as np
from views import select, view

from stepprune_jax.pruning import Downsample


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


def test_every_budget_of_images_of_any_size_equals_the_means_of_drawn_cells():
    """Padding is not read."""
    shapes = [(4, 4), (2, 7), (9, 1), (5, 3)]
    cases = [(grid, count + 1) for grid in shapes for count in range(grid[0] * grid[1])]
    grids, counts = map(np.array, zip(*cases, strict=True))
    valid = np.arange(16) < np.prod(grids, axis=1)[:, None]
    tokens = np.random.default_rng(0).standard_normal((len(cases), 16, 3), np.float32)
    inputs = np.where(valid[..., None], tokens, np.nan)
    kept = select(Downsample(), view(inputs, count=counts, grid=grids, valid=valid), 18)
    kept = jax.tree.map(np.asarray, kept)
    np.testing.assert_array_equal(kept.valid, np.arange(18) < counts[:, None])
    np.testing.assert_array_equal(kept.index, -1)
    for row, (grid, count) in enumerate(cases):
        n, actual, place = grid[0] * grid[1], kept.tokens[row], kept.place[row]
        expected = plain(tokens[row, :n].reshape(*grid, 3), count)
        np.testing.assert_allclose(actual[:count], expected, atol=1e-6)
        assert not actual[count:].any() and not place[count:].any()
        assert (np.diff(place[:count]) > 0).all() and place[count - 1] < n
        if count == n:
            np.testing.assert_array_equal(place[:n], np.arange(n))


def test_five_cells_of_three_by_three_stand_where_their_middles_are():
    inputs = view(np.zeros((1, 9, 1), np.float32), count=5, grid=[[3, 3]])
    assert select(Downsample(), inputs, 5).place[0].tolist() == [0, 2, 6, 7, 8]
