"""An image that is too narrow for Qwen2.5-VL is named, wherever it comes from."""

import json

import pytest
from PIL import Image

from experiments.shapes import write_world
from stepprune_jax.cli import check
from stepprune_jax.inference import read_request
from stepprune_jax.user_input import UserError

NARROW = Image.new("RGB", (2010, 10))
REASON = "an image of 2010 x 10 pixels is too narrow: expected sides of at most 200 to 1"


def test_an_image_is_named_by_its_place_or_file(qwen_model, tmp_path):
    valid_image, path = Image.new("RGB", (20, 10)), tmp_path / "narrow.png"
    NARROW.save(path)
    for image, name in ((NARROW, "image 1 of prompt 1 ('Both?')"), (str(path), path)):
        with pytest.raises(ValueError) as caught:
            read_request(qwen_model, ["One?", "Both?"], [valid_image, [valid_image, image]])
        assert str(caught.value) == f"{name}: {REASON}"
    # In training.
    backbone, settings = qwen_model.backbone, qwen_model.image_settings
    with pytest.raises(ValueError) as caught:
        backbone.pixel_cache(settings, 1 << 20)(path)
    assert str(caught.value) == f"{path}: {REASON}" and isinstance(caught.value, UserError)


def test_the_check_of_a_data_folder_lists_the_file_but_no_fault(tmp_path, capsys):
    folder = write_world(tmp_path / "w", seed=0, train=2, validation=0, test=0)
    samples = json.loads((folder / "train.json").read_text())
    image = folder / "images" / samples[0]["image"]
    NARROW.save(image)
    assert check.main([str(folder)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[-2:] == [
        "images: 2 images decoded, 1 not for all runs",
        f"  {image} has 2010 x 10 pixels: Qwen takes sides of at most 200 to 1",
    ]
