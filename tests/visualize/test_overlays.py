"""Kept patches and their drawing, on small examples worked by hand."""

import numpy as np
from PIL import Image

from stepprune_jax.registry import PRUNERS
from stepprune_jax.visualize import overlays, patches, style


def test_dropped_patches_are_darker_than_kept_patches():
    pixels = np.full((60, 60, 3), 200, np.uint8)
    # The end of the first row and the start of the second.
    dimmed = patches.dim(pixels, np.isin(np.arange(9), [2, 3]).reshape(3, 3))
    assert (dimmed[:20, 40:] == 200).all() and (dimmed[20:40, :20] == 200).all()
    assert (dimmed[:20, :40] < 120).all() and (dimmed[20:40, 20:] < 120).all()
    assert (dimmed[40:] < 120).all()


def test_patches_tile_a_square_of_any_size():
    for side, grid in ((36, 12), (50, 7)):
        covered = np.zeros((side, side), int)
        for token in range(grid * grid):
            left, top, right, bottom = patches.patch_box(token, grid, side)
            covered[top:bottom, left:right] += 1
            kept = (np.arange(grid * grid) == token).reshape(grid, grid)
            middle = patches.dim(np.full((side, side, 3), 255, np.uint8), kept)
            assert (middle[top:bottom, left:right] == 255).all()
        assert (covered == 1).all()


def test_patches_in_the_padded_square_match_a_worked_example():
    # Two rows of three patches are at the top of the square; -1 is a merged token.
    assert patches.square_patches([0, 3, -1, 5, -1], (2, 3)).tolist() == [0, 3, 5]
    # A column is in the middle of the square.
    assert patches.square_patches([2, 0], (3, 1)).tolist() == [7, 1]


def test_wide_images_are_padded_as_for_the_tower(tmp_path):
    Image.new("RGB", (80, 40), "white").save(tmp_path / "wide.png")
    square = patches.read_square(tmp_path / "wide.png", 80)
    assert (square[30:50] > 250).all() and (square[:15] < 5).all() and (square[65:] < 5).all()
    for grid in (12, 24):  # The second grid has no room for numbers, so its marks are dots.
        panel = patches.draw_panel(tmp_path / "wide.png", np.arange(30), grid, 240)
        assert panel.size == (240, 240)


def test_long_answers_are_shortened():
    assert overlays.format_answer("a  dog", "a dog", True) == "a dog"
    text = overlays.format_answer("w" * 30, "狗" * 20, False)
    assert text == f"{'w' * 23}…  (correct: {'狗' * 15}…)"


def test_text_is_wrapped_to_a_width():
    typeface = patches.font(14)
    lines = overlays.wrap_pixels("word " * 40, 200, typeface, max_lines=2)
    assert len(lines) == 2 and lines[-1].endswith("…")
    assert all(typeface.getlength(line) <= 200 for line in lines)
    assert overlays.wrap_pixels("short", 200, typeface, max_lines=2) == ["short"]
    assert len(overlays.wrap_pixels("w" * 300, 200, typeface, max_lines=2)) == 2


def test_methods_have_different_markers_and_learned_stops_are_stars():
    names = [pruner_type.label for pruner_type in PRUNERS.values()]
    looks = style.looks([*names, "StepPrune, own stop"])
    assert len({*looks.values()}) == len(names) + 1
    assert looks["StepPrune, own stop"] == (looks["StepPrune"][0], "*")
