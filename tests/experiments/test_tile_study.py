"""The study of parts of images in tiles."""

import numpy as np
from views import view

from experiments.studies.tiles import InOrder, origins


def test_the_parts_of_an_image_worked_by_hand():
    """A whole image of four tokens, then rows of two patches and an end."""
    kept = [np.array([0, 3, 4]), np.array([6, 5, 8])]
    found = origins(kept, 4, 2)
    assert [*found] == ["whole image", "tiles", "row ends"]
    np.testing.assert_allclose([*found.values()], [100 / 3, 50, 100 / 6])


def test_the_first_and_the_last_tokens():
    valid = np.arange(6) < np.array([[6], [4]])
    shown = view(np.zeros((2, 6, 2), np.float32), count=2, valid=valid)
    assert InOrder(2).rank(shown, 2).order.tolist() == [[0, 1], [0, 1]]
    assert InOrder(2, last=True).rank(shown, 2).order.tolist() == [[5, 4], [3, 2]]
