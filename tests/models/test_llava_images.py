import json

import numpy as np
import pytest
from PIL import Image
from PIL.PngImagePlugin import PngInfo
from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil
from transformers.models.llava.image_processing_pil_llava import LlavaImageProcessorPil
from visual import preprocess_clip

from stepprune_jax import testing
from stepprune_jax.data import images as data_images
from stepprune_jax.data.images import open_image
from stepprune_jax.models.llava import LLAVA, LlavaConfig, images
from stepprune_jax.models.llava.images import ImageSettings

SMALL = {"size": {"shortest_edge": 56}, "crop_size": {"height": 56, "width": 56}}


def _picture(width, height, seed=0):
    random = np.random.default_rng(seed)
    smooth = np.add.outer(np.arange(height) * 3, np.arange(width) * 2)[..., None] % 256
    noise = random.integers(0, 90, (height, width, 3))
    return Image.fromarray(np.clip(smooth + noise - 40, 0, 255).astype(np.uint8))


def _theirs(processor, image):
    return processor(image, return_tensors="np")["pixel_values"][0]


@pytest.mark.parametrize("side", [1, 7, 55, 56, 57, 336, 701])
def test_squares_equal_the_pillow_clip_processor_bit_for_bit(side):
    image = _picture(side, side)
    ours = preprocess_clip(image, images.settings_from_hf(SMALL))
    np.testing.assert_array_equal(ours, _theirs(CLIPImageProcessorPil(**SMALL), image))
    assert ours.dtype == np.float32 and ours.shape == (3, 56, 56)


@pytest.mark.parametrize("size", [(90, 40), (41, 90), (1, 30), (300, 299), (60, 60)])
@pytest.mark.parametrize(
    "fields",
    [
        SMALL,
        SMALL | {"crop_size": {"height": 31, "width": 31}},
        SMALL | {"size": {"height": 70, "width": 70}, "rescale_factor": 0.5},
        SMALL | {"crop_size": 21, "size": 40, "resample": 2, "image_mean": [0.1, 0.2, 0.3]},
    ],
)
def test_padding_is_that_of_llava_with_every_setting(size, fields):
    image = _picture(*size)
    theirs = _theirs(LlavaImageProcessorPil(do_pad=True, **fields), image)
    ours = preprocess_clip(image, images.settings_from_hf(fields))
    np.testing.assert_array_equal(ours, theirs)


@pytest.mark.parametrize("kind", ["CLIPFeatureExtractor", "CLIPImageProcessor"])
def test_published_processors_are_read(kind):
    """That of CLIP's own folder, with numbers, and that of llava-hf's."""
    fields = {"do_resize": True, "do_center_crop": True, "do_normalize": True, "resample": 3}
    if kind == "CLIPFeatureExtractor":
        fields |= {"feature_extractor_type": kind, "size": 336, "crop_size": 336}
    else:
        sides = {"size": {"shortest_edge": 336}, "crop_size": {"height": 336, "width": 336}}
        fields |= {"image_processor_type": kind, "do_convert_rgb": True, "do_rescale": True} | sides
    settings = images.settings_from_hf(fields)
    assert settings == ImageSettings() and settings.fill == (122, 116, 104)
    assert images.settings_from_hf(images.to_hf(settings)) == settings


@pytest.mark.parametrize(
    ("field", "value", "expected"),
    [
        *((f"do_{step}", False, "True") for step in ("resize", "center_crop", "rescale")),
        ("do_normalize", False, "True"),
        ("crop_size", 57, "at most size, 56"),
        ("crop_size", {"height": 40, "width": 41}, "a number, .* or equal"),
        ("size", {"height": 60}, "a number, .* or equal"),
    ],
)
def test_a_processor_that_leaves_a_step_out_is_refused(field, value, expected):
    with pytest.raises(ValueError, match=f"^here: {field} is .*, expected {expected}"):
        images.settings_from_hf(SMALL | {field: value}, "here")


@pytest.mark.parametrize("size", [(700, 30), (31, 700), (600, 599), (600, 600)])
def test_strips_of_a_large_square_give_the_same_bytes(size, monkeypatch):
    image = _picture(*size)
    whole = preprocess_clip(image)
    monkeypatch.setattr(data_images, "STRIP_PIXELS", 1)
    np.testing.assert_array_equal(preprocess_clip(image), whole)


def test_a_mean_that_is_no_byte_pads_with_the_nearest():
    assert ImageSettings(mean=(-0.1, 2.0, 1e8)).fill == (0, 255, 255)


def test_a_decompression_bomb_is_refused_and_explained(tmp_path, monkeypatch):
    path = tmp_path / "bomb.png"
    Image.new("1", (200, 200)).save(path)
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 10_000)
    with pytest.raises(ValueError, match=r"bomb\.png.*PIL\.Image\.MAX_IMAGE_PIXELS"):
        open_image(path)


def test_every_mode_becomes_rgb(tmp_path):
    red = Image.new("RGB", (5, 4), (200, 10, 30))
    palette = red.convert("P", palette=Image.Palette.ADAPTIVE)
    transparent = palette.copy()
    transparent.info["transparency"] = bytes([0] * 256)
    for image in (red, red.convert("RGBA"), red.convert("CMYK"), palette, transparent):
        assert open_image(image).mode == "RGB"
        assert np.abs(np.asarray(open_image(image), int) - (200, 10, 30)).max() <= 1, image.mode
    grey = Image.new("L", (5, 4), 77)
    for image in (grey, grey.convert("LA")):
        assert (np.asarray(open_image(image)) == 77).all(), image.mode
    assert (np.asarray(open_image(Image.new("1", (5, 4), 1))) == 255).all()
    path = tmp_path / "transparent.png"
    transparent.save(path)
    assert open_image(path).mode == "RGB"


@pytest.mark.parametrize("mode", ["I;16", "I;16B"])
def test_sixteen_bit_grey_keeps_its_upper_bits(tmp_path, mode):
    values = np.array([[0, 255, 256], [30_000, 65_280, 65_535]], np.uint16)
    data = values.astype(">u2" if mode == "I;16B" else "<u2").tobytes()
    image = Image.frombytes(mode, (3, 2), data)
    expected = np.repeat((values >> 8)[..., None], 3, axis=2)
    np.testing.assert_array_equal(np.asarray(open_image(image)), expected)
    if mode == "I;16":
        image.save(tmp_path / "deep.png")
        np.testing.assert_array_equal(np.asarray(open_image(tmp_path / "deep.png")), expected)


def test_very_long_sides_are_refused_before_they_are_decoded(tmp_path, monkeypatch):
    path = tmp_path / "long.png"
    Image.new("1", (1, 40_000)).save(path)
    monkeypatch.setattr(Image.Image, "load", None)
    with pytest.raises(ValueError, match=r"long\.png has 1 x 40000 pixels, expected sides"):
        open_image(path)


def test_too_little_memory_for_an_image_is_that_images_error(tmp_path, monkeypatch):
    def refuse(_):
        raise MemoryError

    path = tmp_path / "large.png"
    _picture(4, 4).save(path)
    monkeypatch.setattr("PIL.ImageFile.ImageFile.load", refuse)
    with pytest.raises(ValueError, match=r"large\.png needs more memory than is available"):
        open_image(path)


@pytest.mark.parametrize("kind", [np.int32, np.float32])
def test_grey_of_32_bits_has_no_known_range_and_is_refused(tmp_path, kind):
    path = tmp_path / "grey.tif"
    Image.fromarray(np.array([[0, 1]], kind)).save(path)
    with pytest.raises(
        ValueError, match=r"grey\.tif has 32-bit grey values, expected 8 or 16 bits"
    ):
        open_image(path)


def test_broken_images_are_named(tmp_path):
    whole = tmp_path / "whole.png"
    _picture(64, 64).save(whole)
    cut, text = tmp_path / "cut.png", tmp_path / "text.jpg"
    cut.write_bytes(whole.read_bytes()[:-2000])
    text.write_text("<html>404</html>")
    with pytest.raises(ValueError, match=r"cut\.png is a damaged image"):
        open_image(cut)
    with pytest.raises(ValueError, match=r"text\.jpg is not an image"):
        open_image(text)
    with pytest.raises(ValueError, match="the image is a damaged image"):
        open_image(cut.read_bytes())
    assert open_image(whole.read_bytes()).tobytes() == open_image(whole).tobytes()
    # Pillow's own message has no name; nor has that of a decoder that stumbles.
    info = PngInfo()
    info.add_text("Comment", "x" * 2_000_000, zip=True)
    _picture(4, 4).save(text, "PNG", pnginfo=info)
    with pytest.raises(ValueError, match=r"text\.jpg is a damaged image: Decompressed data too"):
        open_image(text)
    with pytest.raises(FileNotFoundError, match=r"no image file at .*none\.png"):
        open_image(tmp_path / "none.png")
    with pytest.raises(ValueError, match="has 0 x 5 pixels"):
        open_image(Image.new("RGB", (0, 5)))


def test_settings_are_read_from_where_old_and_new_folders_keep_them(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"no preprocessor_config\.json"):
        LLAVA.image_settings(tmp_path)
    nested = tmp_path / "processor_config.json"
    nested.write_text(json.dumps({"image_processor": SMALL}))
    assert LLAVA.image_settings(tmp_path) == ImageSettings(resize_to=56, crop_to=56)
    plain = tmp_path / "preprocessor_config.json"
    plain.write_text(json.dumps({"size": 40, "crop_size": 30, "image_std": [1, 1, 1]}))
    settings = LLAVA.image_settings(tmp_path)
    assert settings.resize_to == 40 and settings.crop_to == 30 and settings.std == (1, 1, 1)


def test_a_batch_stacks_images_of_any_size():
    vision = {"image_size": 336, "patch_size": 14}
    config = LlavaConfig.from_hf(testing.tiny_hf_config(vision=vision))
    settings, pair = ImageSettings(), [_picture(5, 9), _picture(40, 30)]
    batch = LLAVA.preprocess(config, settings, pair)
    assert batch.shape == (2, 3, 336, 336)
    np.testing.assert_array_equal(batch[1], preprocess_clip(_picture(40, 30)))
    with pytest.raises(ValueError, match="the model takes 336 x 336: crop_size"):
        LLAVA.preprocess(config, ImageSettings(crop_to=24), pair)
