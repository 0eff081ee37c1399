import io
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from PIL import ExifTags, Image
from PIL.PngImagePlugin import PngInfo
from transformers import AutoImageProcessor
from transformers.image_utils import load_image
from transformers.models.llava.image_processing_pil_llava import LlavaImageProcessorPil
from visual import preprocess_clip

from stepprune_jax import testing
from stepprune_jax.checkpoints.folder import inspect_folder
from stepprune_jax.data import images as data_images
from stepprune_jax.data.images import open_image
from stepprune_jax.models.config import Normalisation
from stepprune_jax.models.images import normalise, read_normalisation
from stepprune_jax.models.llava import Llava, images
from stepprune_jax.models.llava.images import LlavaImageSettings
from stepprune_jax.user_input import UserError

SMALL = {"size": {"shortest_edge": 56}, "crop_size": {"height": 56, "width": 56}}


def _make_picture(width, height, seed=0):
    random = np.random.default_rng(seed)
    smooth = np.add.outer(np.arange(height) * 3, np.arange(width) * 2)[..., None] % 256
    noise = random.integers(0, 90, (height, width, 3))
    return Image.fromarray(np.clip(smooth + noise - 40, 0, 255).astype(np.uint8))


@pytest.mark.parametrize("size", [(90, 40), (41, 90), (1, 30), (60, 60)])
@pytest.mark.parametrize(
    "fields",
    [
        SMALL,
        SMALL | {"crop_size": {"height": 31, "width": 31}},
        SMALL | {"size": {"height": 70, "width": 70}, "rescale_factor": 0.5},
        SMALL | {"crop_size": 21, "size": 40, "resample": 2, "image_mean": [0.1, 0.2, 0.3]},
    ],
)
@pytest.mark.parametrize("pad", [True, False])
def test_pixels_equal_the_reference_bit_for_bit(size, fields, pad, tmp_path):
    image = _make_picture(*size)
    theirs = LlavaImageProcessorPil(do_pad=pad, **fields)(image, return_tensors="np")
    settings = images.settings_from_hf(fields | {"do_pad": pad})
    _write(tmp_path, preprocessor=fields)
    normalisation = read_normalisation(tmp_path)
    np.testing.assert_array_equal(
        preprocess_clip(image, settings, normalisation), theirs["pixel_values"][0]
    )
    raw = images.to_hf(settings, normalisation)
    assert images.settings_from_hf(raw) == settings
    nulls = dict.fromkeys(raw) | fields  # a null field gets its default
    assert images.settings_from_hf(nulls) == settings._replace(pad=True)


def test_an_image_with_an_extreme_aspect_ratio_is_refused():
    settings = images.settings_from_hf(SMALL | {"do_pad": False})
    assert preprocess_clip(_make_picture(800, 4), settings).shape == (3, 56, 56)
    with pytest.raises(ValueError, match="801 x 4 pixels is too narrow: expected sides of at most"):
        preprocess_clip(_make_picture(801, 4), settings)


@pytest.mark.parametrize("size", [(700, 30), (31, 700)])
def test_padding_in_strips_gives_the_same_bytes(size, monkeypatch):
    image = _make_picture(*size)
    expected = preprocess_clip(image)
    monkeypatch.setattr(data_images, "STRIP_PIXELS", 1)
    np.testing.assert_array_equal(preprocess_clip(image), expected)


def test_a_mean_outside_the_bytes_is_clipped_for_the_padding():
    assert images.padding_color(Normalisation(mean=(-0.1, 2.0, 1e8))) == (0, 255, 255)


@pytest.mark.parametrize(
    "normalisation",
    [
        Normalisation(),
        Normalisation(1 / 127.5, (1.0,) * 3, (1.0,) * 3),
        Normalisation(mean=(0.485, 0.456, 0.406), std=(0.229, 0.224, 0.225)),
        Normalisation(0.003, (0.5, 0.0, -0.1), (0.5, 0.3, 7.0)),
    ],
)
def test_a_program_normalises_every_byte_as_the_reference(normalisation, monkeypatch):
    values = np.broadcast_to(np.arange(256, dtype=np.uint8).reshape(16, 16), (3, 16, 16))
    rescale, mean, std = normalisation
    options = {"rescale_factor": rescale, "image_mean": mean, "image_std": std}
    steps = dict.fromkeys(("do_resize", "do_center_crop", "do_pad"), False)
    processor = LlavaImageProcessorPil(**options, **steps)
    theirs = processor(values, input_data_format="channels_first")["pixel_values"][0]
    program = jax.jit(normalise, static_argnums=(0, 2))
    for ours in (program(normalisation, values, -3), normalise(normalisation, values, -3)):
        assert ours.dtype == np.float32
        np.testing.assert_array_equal(ours, theirs)
    on_accelerator = lambda values, cpu, default: default(values)  # noqa: E731
    monkeypatch.setattr(jax.lax, "platform_dependent", on_accelerator)
    computed = normalise(normalisation, jnp.asarray(values), -3)
    assert computed.dtype == np.float32
    np.testing.assert_allclose(computed, theirs, atol=1e-6, rtol=1e-6)


def test_every_image_mode_is_converted_to_rgb():
    red = Image.new("RGB", (5, 4), (200, 10, 30))
    palette = red.convert("P", palette=Image.Palette.ADAPTIVE)
    transparent = palette.copy()
    transparent.info["transparency"] = bytes([0] * 256)  # Pillow warns of this form
    for image in (red.convert("RGBA"), red.convert("CMYK"), palette, transparent):
        assert np.abs(np.asarray(open_image(image), int) - (200, 10, 30)).max() <= 1, image.mode
    grey = Image.new("LA", (5, 4), (77, 0))
    assert (np.asarray(open_image(grey)) == 77).all()


@pytest.mark.parametrize(("mode", "kind"), [("I;16", "<u2"), ("I;16B", ">u2")])
def test_sixteen_bit_grey_keeps_its_upper_bits(mode, kind):
    values = np.array([[0, 255, 256], [30_000, 65_280, 65_535]], kind)
    image = Image.frombytes(mode, (3, 2), values.tobytes())
    expected = np.repeat((values >> 8)[..., None], 3, axis=2)
    np.testing.assert_array_equal(np.asarray(open_image(image)), expected)


# A picture of 3 x 2 pixels with a number at each corner, and its corners in a viewer for each EXIF
# orientation.
CORNERS = np.array([[10, 0, 20], [30, 0, 40]], np.uint8)
CORNERS_BY_ORIENTATION = {
    1: [[10, 20], [30, 40]],
    2: [[20, 10], [40, 30]],
    3: [[40, 30], [20, 10]],
    4: [[30, 40], [10, 20]],
    5: [[10, 30], [20, 40]],
    6: [[30, 10], [40, 20]],
    7: [[40, 20], [30, 10]],
    8: [[20, 40], [10, 30]],
    9: [[10, 20], [30, 40]],  # no orientation
}


@pytest.mark.parametrize("kind", ["PNG", "TIFF", "WEBP"])
@pytest.mark.parametrize("orientation", CORNERS_BY_ORIENTATION)
def test_an_image_is_turned_by_its_exif_orientation(orientation, kind):
    exif, file = Image.Exif(), io.BytesIO()
    exif[ExifTags.Base.Orientation] = orientation
    options = {"lossless": True} if kind == "WEBP" else {}
    Image.fromarray(CORNERS).save(file, kind, exif=exif, **options)
    turned = open_image(file.getvalue(), as_shown=True)
    corners = np.asarray(turned)[:: turned.height - 1, :: turned.width - 1, 0]
    assert corners.tolist() == CORNERS_BY_ORIENTATION[orientation]
    assert np.asarray(turned).tolist() == np.asarray(load_image(Image.open(file))).tolist()
    # A second call does not turn the image again, and an open image is treated like a file.
    assert np.array_equal(open_image(turned, as_shown=True), turned)
    assert np.array_equal(open_image(Image.open(file), as_shown=True), turned)
    if kind != "TIFF":  # Pillow turns a TIFF itself
        assert np.array_equal(np.asarray(open_image(file.getvalue()))[..., 0], CORNERS)


@pytest.mark.filterwarnings("ignore:Corrupt EXIF data")
@pytest.mark.parametrize("block", [b"", b"?" * 40, b"MM\0*\0\0\0\x08\0\x09\x01\x12\0\x03\0"])
def test_damaged_exif_data_is_ignored(block):
    file = io.BytesIO()
    Image.fromarray(CORNERS).save(file, "PNG", exif=b"Exif\0\0" + block)
    assert np.array_equal(np.asarray(open_image(file.getvalue(), as_shown=True))[..., 0], CORNERS)


def test_a_transparent_background_is_white_in_visible_images():
    drawing = Image.new("RGBA", (3, 1), (0, 0, 0, 0))
    drawing.putpixel((1, 0), (0, 0, 0, 255))
    drawing.putpixel((2, 0), (200, 0, 100, 128))
    assert np.asarray(open_image(drawing)).tolist() == [[[0] * 3, [0] * 3, [200, 0, 100]]]
    expected = [[[255] * 3, [0] * 3, [227, 127, 177]]]
    assert np.asarray(open_image(drawing, as_shown=True)).tolist() == expected
    palette = drawing.quantize(3)
    for image in (drawing.convert("LA"), drawing.convert("PA"), drawing.convert("RGBa"), palette):
        visible = np.asarray(open_image(image, as_shown=True))
        assert (visible[0, :2] == [[255], [0]]).all(), image.mode


@pytest.mark.parametrize("mode", ["1", "L", "P", "RGB", "I;16"])
def test_a_transparent_color_is_white_in_visible_images(mode, tmp_path):
    """The transparent color is black, by the tRNS chunk of PNG or the index of GIF."""
    image = Image.new(mode, (2, 1))
    image.putpixel((1, 0), {"RGB": (0, 90, 0), "I;16": 90 << 8}.get(mode, 1))
    if mode == "P":
        image.putpalette([0, 0, 0, 0, 90, 0])
        image.save(tmp_path / "1.gif", transparency=0)
    image.save(tmp_path / "1.png", transparency=(0, 0, 0) if mode == "RGB" else 0)
    for path in tmp_path.iterdir():
        stored, visible = (np.asarray(open_image(path, as_shown=x)) for x in (False, True))
        assert (stored[0, 0] == 0).all() and (visible[0, 0] == 255).all(), path
        assert np.array_equal(stored[0, 1], visible[0, 1]) and stored[0, 1].any(), path


@pytest.mark.parametrize("kind", ["GIF", "PNG", "WEBP"])
def test_an_animation_gives_its_first_frame(kind):
    frames, file = [Image.new("RGB", (2, 2), (shade,) * 3) for shade in (0, 255)], io.BytesIO()
    frames[0].save(file, kind, save_all=True, append_images=frames[1:], duration=50)
    assert Image.open(file).n_frames == 2
    assert not np.asarray(open_image(file.getvalue(), as_shown=True)).any()


def test_a_cmyk_jpeg_is_not_inverted():
    file = io.BytesIO()
    Image.new("CMYK", (8, 8), (0, 0, 0, 0)).save(file, "JPEG")
    assert np.asarray(open_image(file.getvalue())).min() > 250  # no ink


def exhaust_memory(_):
    raise MemoryError


@pytest.mark.parametrize(
    ("size", "name", "value", "message"),
    [
        ((200, 200), "PIL.Image.MAX_IMAGE_PIXELS", 10_000, r".*PIL\.Image\.MAX_IMAGE_PIXELS"),
        # These sides are refused before the image is decoded.
        ((1, 40_000), "PIL.Image.Image.load", None, " has 1 x 40000 pixels, expected sides"),
        ((4, 4), "PIL.ImageFile.ImageFile.load", exhaust_memory, " needs more memory than is"),
    ],
)
def test_an_image_that_is_too_large_is_named(tmp_path, monkeypatch, size, name, value, message):
    path = tmp_path / "large.png"
    Image.new("1", size).save(path)
    monkeypatch.setattr(name, value)
    with pytest.raises(ValueError, match=rf"large\.png{message}"):
        open_image(path)


@pytest.mark.parametrize(
    ("start", "message"),
    [
        (b"\0\0\0\x20ftypisom", "is a video; expected an image"),
        (b"\0\0\0\x14ftypqt  ", "is a video; expected an image"),
        (b"\x1aE\xdf\xa3", "is a video; expected an image"),
        (b"RIFF\x10\0\0\0AVI LIST", "is a video; expected an image"),
        (b"\0\0\0\x18ftypheic", "is a HEIC photo, which Pillow cannot read: convert it"),
        (b"version https://git-lfs.github.com/spec/v1\n", "is a pointer of Git LFS: run"),
        (b"\n<!DOCTYPE html><html>404</html>", "is a web page; expected an image"),
        (b"", "is not an image in a format that Pillow reads: the file is empty"),
        (b"GIF", "is not an image in a format that Pillow reads"),
    ],
)
def test_the_error_for_a_file_that_is_no_image_names_its_format(start, message, tmp_path):
    path, data = tmp_path / "x.jpg", start + bytes(200 if start else 0)
    path.write_bytes(data)
    for source, name in ((path, str(path)), (data, "the image")):
        with pytest.raises(UserError) as error:
            open_image(source)
        text = str(error.value)
        assert text.startswith(f"{name} {message}") and "\n" not in text


def test_postscript_in_an_image_file_is_not_executed(tmp_path, monkeypatch):
    """Pillow would pass the PostScript of an EPS file to Ghostscript, which executes it."""
    path = tmp_path / "x.png"
    path.write_text("%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n%%EndComments\n%%EOF\n")
    monkeypatch.setattr("PIL.EpsImagePlugin.Ghostscript", pytest.fail)
    with pytest.raises(ValueError, match=r"x\.png is an EPS drawing: convert it to PNG"):
        open_image(path)


def test_errors_of_damaged_images_name_the_file(tmp_path):
    intact = tmp_path / "whole.png"
    _make_picture(64, 64).save(intact)
    (tmp_path / "cut.png").write_bytes(intact.read_bytes()[:-2000])
    info = PngInfo()
    info.add_text("Comment", "x" * 2_000_000, zip=True)
    # Pillow raises an error of another type.
    _make_picture(4, 4).save(tmp_path / "comment.png", pnginfo=info)
    # The range of 32-bit values is unknown.
    Image.fromarray(np.array([[0, 1]], np.float32)).save(tmp_path / "grey.tif")
    for name, message in (
        ("cut.png", "is a damaged image"),
        ("comment.png", "has more text or .*PIL.PngImagePlugin.MAX_TEXT_CHUNK$"),
        ("grey.tif", "has 32-bit grey values"),
    ):
        with pytest.raises(ValueError, match=rf"{name} {message}"):
            open_image(tmp_path / name)
    with pytest.raises(FileNotFoundError, match=r"no image file at .*none\.png"):
        open_image(tmp_path / "none.png")
    with pytest.raises(ValueError, match="has 0 x 5 pixels"):
        open_image(Image.new("RGB", (0, 5)))
    assert open_image(intact.read_bytes()).tobytes() == open_image(intact).tobytes()


def _write(folder, processor=None, preprocessor=None):
    for name, raw in (("processor", processor), ("preprocessor", preprocessor)):
        if raw is not None:
            (folder / f"{name}_config.json").write_text(json.dumps(raw))


def test_settings_are_read_from_old_and_new_processor_files(tmp_path, capsys):
    with pytest.raises(FileNotFoundError, match=r"no preprocessor_config\.json"):
        Llava.image_settings(tmp_path)
    (tmp_path / "config.json").write_text('{"model_type": "llava"}')
    processor_type = {"image_processor_type": "LlavaImageProcessor"}
    old_fields = SMALL | processor_type | {"crop_size": 30, "resample": 2}
    for new_fields, conflicts in (
        ({"patch_size": 7}, ""),
        ({"image_processor": None}, ""),
        ({"image_processor": SMALL | processor_type | {"do_pad": True}}, "crop_size"),
        ({"image_processor": processor_type | {"size": 240, "resample": 0}}, "resample, size"),
        ({"image_processor": {}}, ""),
    ):
        _write(tmp_path, new_fields, old_fields)
        theirs, ours = AutoImageProcessor.from_pretrained(tmp_path), Llava.image_settings(tmp_path)
        assert ours.crop_to == theirs.crop_size["height"]
        assert (ours.resize_to, ours.resample) == (theirs.size.shortest_edge, theirs.resample)
        Llava.image_settings(tmp_path)
        warnings = capsys.readouterr().err
        assert warnings.count("\n") == bool(conflicts)
        if conflicts:
            words = f"preprocessor_config.json is not read: image_processor of {tmp_path}"
            assert words in warnings and warnings.endswith(f"has another {conflicts}\n")
    (tmp_path / "preprocessor_config.json").unlink()
    assert Llava.image_settings(tmp_path) == LlavaImageSettings(resize_to=224, crop_to=224)
    _write(tmp_path, {"image_processor": [1]})
    with pytest.raises(ValueError, match=r"/processor_config\.json: image_processor is \[1\]"):
        Llava.image_settings(tmp_path)


def test_placeholder_fields_of_another_model_cause_a_warning(tmp_path, llava_folder, capsys):
    published = {"patch_size": 8, "vision_feature_select_strategy": "default"}
    for fields in ({}, {"num_additional_image_tokens": 1, "image_token": "<image>"}):
        _write(tmp_path, published | fields)
        (tmp_path / "config.json").write_bytes((llava_folder / "config.json").read_bytes())
        inspect_folder(tmp_path)
        assert not capsys.readouterr().err
    _write(tmp_path, published | {"patch_size": 14, "num_additional_image_tokens": 0})
    inspect_folder(tmp_path)
    token_warning, patch_warning = capsys.readouterr().err.splitlines()
    path = tmp_path / "processor_config.json"
    assert f"{path}: num_additional_image_tokens is 0, which is not followed: 1 is" in token_warning
    assert f"{path}: patch_size is 14, which is not followed: 8 is" in patch_warning


def test_a_crop_of_another_size_than_the_model_is_refused():
    backbone = Llava.read(testing.tiny_hf_config(), None)
    with pytest.raises(ValueError, match="the model takes 24 x 24: crop_size"):
        backbone.preprocess(LlavaImageSettings(crop_to=23), [_make_picture(40, 30)])
