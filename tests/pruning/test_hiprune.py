import dataclasses

import numpy as np
import pytest
import torch_pruning
from generation_reference import ask, traced
from views import llava, select, view

from stepprune_jax.models.attention import Tap
from stepprune_jax.pruning import HiPrune
from stepprune_jax.user_input import UserError


def plain(shallow, deep, count, columns, alpha):
    """The authors' choice for one image, in loops over Python numbers."""
    n = len(shallow)
    anchors = sorted(range(n), key=lambda i: (-shallow[i], i))[: round(count * alpha / 5)]
    steps = (0, -1, 1, -columns, columns)
    chosen = {min(max(anchor + step, 0), n - 1) for anchor in anchors for step in steps}
    remaining = sorted(set(range(n)) - chosen, key=lambda i: (-deep[i], i))
    return sorted([*chosen, *remaining[: count - len(chosen)]])


@pytest.mark.parametrize("alpha", [0.0, 0.1, 0.5, 1.0])
def test_images_of_any_size_equal_a_plain_loop(alpha):
    random = np.random.default_rng(0)
    grids = np.array([(6, 8), (5, 7), (4, 4)], np.int32)
    sizes, counts = grids.prod(1), np.array([30, 20, 15])
    shallow, deep = random.random((2, 3, 48), np.float32) / 48
    valid = np.arange(48) < sizes[:, None]
    tokens = random.standard_normal((3, 48, 4), np.float32)
    inputs = view(tokens, shallow, deep, count=counts, valid=valid, grid=grids)
    kept = select(HiPrune(alpha=alpha), inputs, 30)
    for row, (size, count) in enumerate(zip(sizes, counts, strict=True)):
        signals = shallow[row, :size], deep[row, :size]
        expected = plain(*signals, count, grids[row, 1], alpha)
        assert kept.index[row, :count].tolist() == expected
        np.testing.assert_array_equal(kept.tokens[row, :count], tokens[row, expected])


def test_neighbours_beyond_a_border_worked_by_hand():
    """Of 3 x 3, the anchor 0 has 1 and 3, and its missing neighbors are 0; 2 has 1, 3 and 5."""
    deep = np.float32([[0.0, 0.1, 0.2, 0.3, 0.9, 0.5, 0.6, 0.7, 0.8]])
    for anchor, count, chosen in ((0, 3, [0, 1, 3]), (2, 5, [0, 1, 2, 3, 5]), (8, 4, [5, 7, 8])):
        shallow = np.eye(9, dtype=np.float32)[[anchor]]
        grid = np.array([[3, 3]], np.int32)
        inputs = view(np.zeros((1, 9, 2), np.float32), shallow, deep, count=count, grid=grid)
        kept = select(HiPrune(alpha=5 / count), inputs, 5)
        remaining = [4] * (count - len(chosen))  # the best register
        assert kept.index[0, :count].tolist() == sorted([*chosen, *remaining])


def in_tiles(plan, side):
    """Tile, row and column in it of each token of 2 x 2 tiles and the like; -1 for row ends."""
    down, across = plan
    places = [(0, *divmod(i, side)) for i in range(side * side)]
    for row in range(down * side):
        for column in range(across * side):
            tile = 1 + row // side * across + column // side
            places.append((tile, row % side, column % side))
        places.append((-1, -1, -1))
    return places


def plain_in_tiles(shallow, deep, places, share, alpha):
    """The same in each tile, without neighbors beyond its border."""
    kept = []
    for tile in range(max(tile for tile, _, _ in places) + 1):
        of_tile = [i for i, place in enumerate(places) if place[0] == tile]
        anchors = sorted(of_tile, key=lambda i: (-shallow[i], i))[: round(share * alpha / 5)]
        chosen = set()
        for anchor in anchors:
            distance = np.abs(np.array(places) - places[anchor]).sum(1)
            chosen |= {i for i in of_tile if distance[i] <= 1}
        remaining = sorted(set(of_tile) - chosen, key=lambda i: (-deep[i], i))
        kept += [*chosen, *remaining[: share - len(chosen)]]
    return sorted(kept)


@pytest.mark.parametrize("plan", [(2, 2), (1, 3)])
def test_each_tile_has_its_own_anchors_and_an_equal_share(plan):
    random, side, share = np.random.default_rng(1), 4, 9
    places = in_tiles(plan, side)
    n, tiles = len(places), 1 + plan[0] * plan[1]
    tile = np.array([[place[0] for place in places]], np.int32)
    shallow, deep = random.random((2, 1, n), np.float32) / n
    grid = np.array([plan], np.int32) * side
    count, tokens = share * tiles, random.standard_normal((1, n, 4), np.float32)
    inputs = view(tokens, shallow, deep, tile, count=count, grid=grid)
    kept = select(HiPrune(alpha=0.9), inputs, count)
    expected = plain_in_tiles(shallow[0], deep[0], places, share, 0.9)
    assert kept.index[0, :count].tolist() == expected


def test_the_blocks_are_the_authors():
    """Of 24 blocks the ninth, and the one whose output is projected."""
    config = llava()
    config = dataclasses.replace(config, vision=dataclasses.replace(config.vision, num_layers=24))
    assert HiPrune(64).taps(config) == (Tap("received", 8), Tap("received", 22))
    assert HiPrune(64, object_layer=1).taps(config)[0] == Tap("received", 0)
    with pytest.raises(UserError, match=r"object_layer is 25, expected one of 1, 2, "):
        HiPrune(2, object_layer=25).check(config, 9)


def test_generation_equals_the_torch_reference(llava_pair):
    columns, depth = llava_pair.ours.config.grid[1], llava_pair.ours.config.vision.num_layers

    def choose(tower, pixels):
        shallow, deep = (torch_pruning.received(tower, pixels, block) for block in (-depth, -2))
        index = plain(shallow, deep, 5, columns, 1.0)
        return index, torch_pruning.all_patches(tower, pixels)[index]

    method = HiPrune(5, object_layer=1, alpha=1.0)
    for example in traced(llava_pair, ask(3, seed=5), method, 1):
        torch_pruning.check(llava_pair, example, choose)
