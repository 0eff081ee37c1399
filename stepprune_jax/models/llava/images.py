"""LLaVA's image processor: optional padding to a square, resizing with Pillow, and a center crop.

After normalization, every number equals the Pillow image processor of ``transformers`` bit for bit.
The resampling of torchvision differs from Pillow by up to one gray level.
"""

from pathlib import Path
from typing import NamedTuple

import numpy as np
from PIL import Image

from stepprune_jax.data.images import pad_to_square
from stepprune_jax.data.json_files import read_json_object
from stepprune_jax.models.config import (
    MAX_SIDE,
    FieldRule,
    Json,
    Normalisation,
    bool_rule,
    choice_rule,
    read_fields,
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
    """Settings of the image processor; the steps have the order of the fields.

    Attributes:
        pad: whether images are padded to squares first. LLaVA-1.5 was trained with padding, so it
            is the default, although the published processor files do not mention it.
        stretch: whether an image that is not padded is resized to a square. If False, its shorter
            side is resized to `resize_to`.
        resize_to: side in pixels after resizing.
        crop_to: side in pixels of the center crop.
        resample: number of a Pillow resampling filter.
    """

    pad: bool = True
    stretch: bool = False
    resize_to: int = 336
    crop_to: int = 336
    resample: int = 3


def padding_color(normalisation: Normalisation) -> tuple[int, ...]:
    """Returns the color of the padding: the mean as truncated bytes, (122, 116, 104) for CLIP."""
    return tuple(int(min(max(value, 0), 1) * 255) for value in normalisation.mean)


def _side_rule(field: str) -> FieldRule:
    """Returns the rule for the side of a square image: a number or an object with sides."""

    def read(value: object) -> int | None:
        sides = value if isinstance(value, dict) else {"shortest_edge": value}
        names = ("height", "width") if "height" in sides else ("shortest_edge",)
        side = sides.get(names[0])
        is_square = len(sides) == len(names) and side == sides.get(names[-1])
        return side if is_square and is_count(side) and side <= MAX_SIDE else None

    forms = "a number, {shortest_edge} or equal {height, width}"
    return FieldRule(field, 224, read, f"{forms}, of 1 to {MAX_SIDE} pixels")


def _read_stretch(value: object) -> bool:
    """Reads `size`; returns whether it has both sides, instead of the shortest edge."""
    return isinstance(value, dict) and "height" in value


_SETTINGS = {
    **RESAMPLE,
    "resize_to": _side_rule("size"),
    "crop_to": _side_rule("crop_size"),
    "pad": bool_rule("do_pad", True),
    "stretch": FieldRule("size", False, _read_stretch, "a size"),
}
_ONLY = {
    "resize": choice_rule("do_resize", True),
    "crop": choice_rule("do_center_crop", True),
    "rescale": choice_rule("do_rescale", True),
    "normalize": choice_rule("do_normalize", True),
    "default_square": choice_rule("default_to_square", False),
    "square": choice_rule("use_square_size", False),
}


def settings_from_hf(raw: Json, where: str = "image processor config") -> LlavaImageSettings:
    """Translates the JSON object of a Hugging Face image processor.

    Args:
        raw: the parsed JSON object.
        where: its file, for error messages.

    Returns:
        The settings.

    Raises:
        ValueError: the kind of the processor or a field is not supported.
    """
    kind = str(raw.get("image_processor_type") or raw.get("feature_extractor_type") or "CLIP")
    is_other_llava = kind.startswith(("LlavaNext", "LlavaOne"))
    is_supported = kind.startswith(("CLIP", "Llava")) and not is_other_llava
    supported = "supported: CLIPImageProcessor, LlavaImageProcessor"
    require(is_supported, f"{where}: unsupported image processor {kind!r}; {supported}")
    read_fields(raw, where, _ONLY)
    settings = LlavaImageSettings(**read_fields(raw, where, _SETTINGS))
    size, crop = settings.resize_to, settings.crop_to
    require(crop <= size, f"{where}: crop_size is {crop}, expected at most size, {size}")
    return settings


def override_padding(settings: LlavaImageSettings, pad: bool | None) -> LlavaImageSettings:
    """Returns the settings with the padding that the model requires; None keeps the settings."""
    return settings if pad is None else settings._replace(pad=pad)


def placeholder_fields(patch_size: int) -> Json:
    """Returns the processor's fields that decide the number of image tokens in `transformers`."""
    return {
        "num_additional_image_tokens": 1,
        "patch_size": patch_size,
        "vision_feature_select_strategy": "default",
    }


def warn_of_placeholders(folder: str | Path, patch_size: int) -> None:
    """Warns if a folder's processor computes another number of image tokens than the model."""
    path = Path(folder, PROCESSOR_FILE)
    raw = read_json_object(path) if path.is_file() else {}
    for name, value in placeholder_fields(patch_size).items():
        if raw.get(name) not in (None, value):
            warn_once(f"{path}: {name} is {raw[name]!r}, which is not followed: {value!r} is")


def to_hf(settings: LlavaImageSettings, normalisation: Normalisation) -> Json:
    """Returns the JSON fields of the image processor, which `settings_from_hf` reads."""
    sides = ("height", "width") if settings.stretch else ("shortest_edge",)
    return {
        # CLIP's processor with the option `do_pad`.
        "image_processor_type": "LlavaImageProcessor",
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
    """Pads, resizes and crops an RGB image.

    Args:
        image: RGB image of any size.
        settings: settings of the image processor.
        normalisation: normalization of the bytes, which defines the color of the padding.

    Returns:
        [3, crop_to, crop_to] uint8 pixels.

    Raises:
        ValueError: the image is too narrow to be resized by its shorter side.
    """
    side, crop = settings.resize_to, settings.crop_to
    if settings.pad:
        color = padding_color(normalisation)
        resized = pad_to_square(image, color, side, settings.resample)
    elif settings.stretch:
        resized = image.resize((side, side), settings.resample)
    else:
        check_aspect(image.width, image.height)
        shorter = min(image.size)
        width, height = (int(side * length / shorter) for length in image.size)
        resized = image.resize((width, height), settings.resample)
    left, top = ((length - crop) // 2 for length in resized.size)
    return np.asarray(resized.crop((left, top, left + crop, top + crop))).transpose(2, 0, 1)
