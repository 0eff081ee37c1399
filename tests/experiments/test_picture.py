"""The README's picture, drawn with the shipped model."""

import pytest
from PIL import Image
from small_world import ROOT

from experiments.shapes import write_world
from experiments.studies import picture


@pytest.mark.slow
def test_four_questions_about_one_image_are_drawn(tmp_path):
    world = write_world(tmp_path / "world", seed=0, train=0, validation=0, test=80)
    out = tmp_path / "picture.png"
    picture.main(["--data", str(world), "--out", str(out)])
    with Image.open(out) as picture_file, Image.open(ROOT / "docs/images/overlay.png") as expected:
        assert picture_file.size == expected.size
    for name in ("test.jsonl", "test_answers.jsonl"):
        (world / name).write_text((world / name).read_text().splitlines()[0])
    with pytest.raises(ValueError, match="no image has questions of position, color"):
        picture.main(["--data", str(world), "--out", str(out)])
