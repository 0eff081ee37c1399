"""Images to CLIP pixels: usually pad to a square, Pillow bicubic, crop.

Every number, normalised, is that of the Pillow image processor of ``transformers``, bit for bit.
Pillow's own resampling is the reference; torchvision's differs by up to one grey level.
"""

from pathlib import Path
from typing import NamedTuple

import numpy as np
from PIL import Image

from stepprune_jax.data.images import pad_to_square
from stepprune_jax.data.json_files import read_json_object
from stepprune_jax.models.config import (
    LONGEST_SIDE,
    FieldRule,
    Json,
    Normalisation,
    one_of,
    read_fields,
    switch,
)
from stepprune_jax.models.images import (
    PROCESSOR_FILE,
    RESAMPLE,
    Bytes,
    check_aspect,
    describe_normalisation,
)
from stepprune_jax.settings import is_count
from stepprune_jax.user_input import require, warn_once


class LlavaImageSettings(NamedTuple):
    """Settings of the image processor, whose steps follow the order of the fields.

    Images are padded to squares first, as LLaVA-1.5 was trained, although the published processor
    files omit it; unless a file says that they are not. An image that is not padded is resized by
    its shorter side, or, with `stretch`, to a square. `resize_to` and `crop_to` are sides in
    pixels; `resample` is the number of a Pillow filter.
    """

    pad: bool = True
    stretch: bool = False
    resize_to: int = 336
    crop_to: int = 336
    resample: int = 3


def padding_color(normalisation: Normalisation) -> tuple[int, ...]:
    """Returns the colour of the padding: the mean truncated to bytes, (122, 116, 104) for CLIP."""
    return tuple(int(min(max(value, 0), 1) * 255) for value in normalisation.mean)


def _side(field: str) -> FieldRule:
    """A side of a square image."""

    def read(value: object) -> int | None:
        given = value if isinstance(value, dict) else {"shortest_edge": value}
        sides = [given.get(name) for name in ("height", "width")] if "height" in given else []
        sides = sides or [given.get("shortest_edge")]
        known = len(given) == len(sides) and sides[0] == sides[-1]
        return sides[0] if known and is_count(sides[0]) and sides[0] <= LONGEST_SIDE else None

    kinds = "a number, {shortest_edge} or equal {height, width}"
    return FieldRule(field, 224, read, f"{kinds}, of 1 to {LONGEST_SIDE} pixels")


_SETTINGS = {
    **RESAMPLE,
    "resize_to": _side("size"),
    "crop_to": _side("crop_size"),
    "pad": switch("do_pad", True),
    "stretch": FieldRule("size", False, lambda x: isinstance(x, dict) and "height" in x, "a size"),
}
_ONLY = {
    "resize": one_of("do_resize", True),
    "crop": one_of("do_center_crop", True),
    "rescale": one_of("do_rescale", True),
    "normalize": one_of("do_normalize", True),
    "default_square": one_of("default_to_square", False),
    "square": one_of("use_square_size", False),
}


def settings_from_hf(raw: Json, where: str = "image processor config") -> LlavaImageSettings:
    """Translates a Hugging Face image processor dict of the file `where`."""
    kind = str(raw.get("image_processor_type") or raw.get("feature_extractor_type") or "CLIP")
    known = kind.startswith(("CLIP", "Llava")) and not kind.startswith(("LlavaNext", "LlavaOne"))
    supported = "supported: CLIPImageProcessor, LlavaImageProcessor"
    require(known, f"{where}: unsupported image processor {kind!r}; {supported}")
    read_fields(raw, where, _ONLY)
    settings = LlavaImageSettings(**read_fields(raw, where, _SETTINGS))
    size, crop = settings.resize_to, settings.crop_to
    require(crop <= size, f"{where}: crop_size is {crop}, expected at most size, {size}")
    return settings


def padded(settings: LlavaImageSettings, pad: bool | None) -> LlavaImageSettings:
    """Returns the settings of a model that pads images or does not, or with None leaves it open."""
    return settings if pad is None else settings._replace(pad=pad)


def placeholders(patch_size: int) -> Json:
    """Returns the fields by which `transformers` counts the placeholders of an image's tokens."""
    return {
        "num_additional_image_tokens": 1,
        "patch_size": patch_size,
        "vision_feature_select_strategy": "default",
    }


def name_other_placeholders(folder: str | Path, patch_size: int) -> None:
    """Warns of a folder whose processor counts other placeholders than the model has tokens."""
    path = Path(folder, PROCESSOR_FILE)
    raw = read_json_object(path) if path.is_file() else {}
    for name, value in placeholders(patch_size).items():
        if raw.get(name) not in (None, value):
            warn_once(f"{path}: {name} is {raw[name]!r}, which is not followed: {value!r} is")


def to_hf(settings: LlavaImageSettings, normalisation: Normalisation) -> Json:
    """Describes the image processor."""
    sides = ("height", "width") if settings.stretch else ("shortest_edge",)
    return {
        "image_processor_type": "LlavaImageProcessor",  # CLIP's with a switch for the padding
        "do_convert_rgb": True,
        "do_pad": settings.pad,
        "do_resize": True,
        "size": dict.fromkeys(sides, settings.resize_to),
        "resample": settings.resample,
        "do_center_crop": True,
        "crop_size": {"height": settings.crop_to, "width": settings.crop_to},
        **describe_normalisation(normalisation),
    }


def resize(image: Image.Image, settings: LlavaImageSettings, normalisation: Normalisation) -> Bytes:
    """Pads an RGB image to a square, if it is to be, resizes it and crops its centre."""
    side, crop = settings.resize_to, settings.crop_to
    if settings.pad:
        color = padding_color(normalisation)
        whole = pad_to_square(image, color, side, settings.resample)
    else:
        if not settings.stretch:
            check_aspect(image.width, image.height)
        short = min(image.size)
        width, height = (side if settings.stretch else int(side * x / short) for x in image.size)
        whole = image.resize((width, height), settings.resample)
    left, top = ((x - crop) // 2 for x in whole.size)
    return np.asarray(whole.crop((left, top, left + crop, top + crop))).transpose(2, 0, 1)
