"""Video processors of the Qwen-VL families: which frames are read, their sizes and their patches.

Frame indices, sizes, bytes and times equal the video processors of ``transformers``. Two frames are
one temporal patch. A video of an odd number of frames repeats its last frame.
"""

import math
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Int

from stepprune_jax.data.json_files import read_json_object
from stepprune_jax.data.videos import (
    MAX_FPS,
    MAX_FRAMES,
    ClipShape,
    Frame,
    Video,
    VideoFrames,
    open_video,
)
from stepprune_jax.models.config import (
    Json,
    number_rule,
    object_rule,
    read_fields,
    size_rule,
)
from stepprune_jax.models.images import (
    PROCESSOR_FILE,
    Clip,
    check_aspect,
    describe_normalisation,
    read_processor,
)
from stepprune_jax.models.qwen2_5_vl.config import PatchModelConfig
from stepprune_jax.models.qwen2_5_vl.images import Patches, VideoSettings, to_patches
from stepprune_jax.models.resampling import resize_like_torch
from stepprune_jax.user_input import UserError, naming, require

VIDEO_FILE = "video_preprocessor_config.json"
# Largest areas in files of published models are far below this limit.
_MAX_AREA = 1 << 34
# Most visual tokens of a video. Their patches take 300 MB.
MAX_CLIP_TOKENS = 65_536
_AREA_NAMES = {"min_pixels": "shortest_edge", "max_pixels": "longest_edge"}
_SAMPLING = {
    "fps": number_rule("fps", 2.0),
    "min_frames": size_rule("min_frames", 4, MAX_FRAMES),
    "max_frames": size_rule("max_frames", MAX_FRAMES, 1 << 20),
}


class FrameSize(NamedTuple):
    """Sides of a frame in pixels."""

    height: int
    width: int


def read_settings(folder: str | Path, default: VideoSettings) -> VideoSettings:
    """Reads the settings of the video processor of a checkpoint folder.

    As in `transformers`, these are the entry ``video_processor`` of ``processor_config.json``, the
    file ``video_preprocessor_config.json``, or the file of the image processor, in this order.

    Args:
        folder: the checkpoint folder, which has an image processor.
        default: values of fields that the file does not have.

    Raises:
        ValueError: a field has an invalid value.
    """
    combined, file = Path(folder, PROCESSOR_FILE), Path(folder, VIDEO_FILE)
    raw, where = None, str(combined)
    if combined.is_file():
        rule = object_rule("video_processor")._replace(optional=True)
        raw = read_fields(read_json_object(combined), where, {"entry": rule})["entry"]
    if raw is None and file.is_file():
        raw, where = read_json_object(file), str(file)
    if raw is None:
        raw, where = read_processor(folder)
    raw = {name: value for name, value in raw.items() if value is not None}
    sampling = read_fields({"fps": default.fps, **raw}, where, _SAMPLING)
    # The limits are fields of the processor, or entries of its field `size`, by other names.
    area = read_fields(raw, where, {"size": object_rule("size", {})})["size"]
    bounds = {
        name: raw.get(name, area.get(entry, getattr(default, name)))
        for name, entry in _AREA_NAMES.items()
    }
    rules = {name: size_rule(name, getattr(default, name), _MAX_AREA) for name in _AREA_NAMES}
    sampling["fps"] = min(sampling["fps"], MAX_FPS)
    sampling["max_frames"] = min(sampling["max_frames"], MAX_FRAMES)
    settings = VideoSettings(**read_fields(bounds, where, rules), **sampling)
    require(
        settings.min_pixels <= settings.max_pixels and settings.min_frames <= settings.max_frames,
        f"{where}: the smallest area or number of frames of a video exceeds the largest",
    )
    return settings


def to_hf(config: PatchModelConfig, settings: VideoSettings, processor_class: str) -> Json:
    """Returns the JSON fields of the video processor.

    Args:
        config: configuration of the model.
        settings: settings of the video processor.
        processor_class: name of the video processor's class in `transformers`.
    """
    return {
        "video_processor_type": processor_class,
        "do_convert_rgb": True,
        "do_resize": True,
        "do_sample_frames": True,
        "size": {"shortest_edge": settings.min_pixels, "longest_edge": settings.max_pixels},
        "fps": settings.fps,
        "min_frames": settings.min_frames,
        "max_frames": settings.max_frames,
        **describe_normalisation(config.normalisation),
        "patch_size": config.vision.patch_size,
        "temporal_patch_size": config.vision.temporal_patch_size,
        "merge_size": config.vision.merge_size,
    }


def sample_by_linspace(
    settings: VideoSettings, total: int, rate: float, video: Video
) -> Int[np.ndarray, "k"]:
    """Returns the indices of the frames that Qwen3-VL reads, including first and last frame.

    Args:
        settings: settings of the video processor.
        total: number of frames of the video.
        rate: number of frames of the video per second.
        video: the video, with the number of frames to sample or their rate.
    """
    if video.num_frames is not None:
        count = min(video.num_frames, total)
    elif not video.is_file:
        count = total
    else:
        count = int(total / rate * (video.fps or settings.fps))
        count = min(max(count, settings.min_frames), settings.max_frames, total)
    return np.linspace(0, total - 1, count).round().astype(int)


def sample_by_steps(
    settings: VideoSettings, total: int, rate: float, video: Video
) -> Int[np.ndarray, "k"]:
    """Returns the indices of the frames that Qwen2.5-VL reads: an even number, from the first on.

    Args:
        settings: settings of the video processor.
        total: number of frames of the video.
        rate: number of frames of the video per second.
        video: the video, with the number of frames to sample or their rate.
    """
    largest_even = total // 2 * 2
    if video.num_frames is not None:
        count = min(round(video.num_frames / 2) * 2, largest_even)
    elif not video.is_file:
        return np.arange(total)
    else:
        limit = min(settings.max_frames // 2 * 2, largest_even)
        exact_count = total / rate * (video.fps or settings.fps)
        count = math.floor(min(max(exact_count, settings.min_frames), limit) / 2) * 2
    # A single frame: too few for a pair, or the only one that was requested.
    count = max(count, 1)
    # `transformers` computes the indices in float32.
    return np.arange(0, total, total / count).astype(np.float32).astype(int)


def frame_size(
    factor: int, settings: VideoSettings, size: FrameSize, num_frames: int = 1
) -> FrameSize:
    """Returns the size of resized frames, whose area is kept within limits.

    The sides are rounded to multiples of `factor`, and then scaled by one factor if the area of all
    frames together is outside the limits.

    Args:
        factor: side of a merged patch in pixels.
        settings: the limits of the area.
        size: size of the frames of the video.
        num_frames: number of frames whose areas are added; 1 for limits of a single frame.
    """
    height, width = size
    check_aspect(width, height)
    # As in `transformers`: an odd number is rounded to the nearest multiple of 4.
    num_rounded_frames = 1 if num_frames == 1 else round(num_frames / 2) * 2
    rounded = [round(side / factor) * factor for side in size]
    area = num_rounded_frames * rounded[0] * rounded[1]
    if area > settings.max_pixels:
        scale = math.sqrt((num_frames * height * width) / settings.max_pixels)
        rounded = [max(factor, math.floor(side / scale / factor) * factor) for side in size]
    elif area < settings.min_pixels:
        scale = math.sqrt(settings.min_pixels / (num_frames * height * width))
        rounded = [math.ceil(side * scale / factor) * factor for side in size]
    return FrameSize(*rounded)


def bound_area(settings: VideoSettings, max_pixels: int) -> VideoSettings:
    """Returns settings whose limits of the area are at most `max_pixels`."""
    return settings._replace(
        min_pixels=min(settings.min_pixels, max_pixels),
        max_pixels=min(settings.max_pixels, max_pixels),
    )


def enlarge_to_patch(factor: int, size: FrameSize) -> FrameSize:
    """Scales a size so that both sides have at least `factor` pixels, as Qwen3-VL does first."""
    height, width = size
    if min(height, width) >= factor:
        return size
    scale = max(factor / height, factor / width)
    return FrameSize(int(height * scale), int(width * scale))


def patch_times(
    frames: VideoFrames, indices: Int[np.ndarray, "k"], frames_per_patch: int
) -> tuple[float, ...]:
    """Returns the time of each temporal patch: the mean time of its first and last frame."""
    padding = -len(indices) % frames_per_patch
    times = frames.times[np.concatenate([indices, indices[-1:].repeat(padding)])]
    firsts, lasts = times[::frames_per_patch], times[frames_per_patch - 1 :: frames_per_patch]
    return tuple(((firsts + lasts) / 2).tolist())


def read_clip(family: Any, settings: VideoSettings, video: Video) -> Clip:
    """Reads the sampled frames of a video as temporal patches.

    Args:
        family: the backbone, a `QwenBackbone`. Its methods choose the frames and their size.
        settings: settings of the video processor.
        video: the video.

    Returns:
        The clip. Each of its temporal patches has the values of `temporal_patch_size` frames.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: the video cannot be read, or has too many tokens; the message names it.
    """
    config, frames = family.config, open_video(video)
    total = len(frames.times)
    indices = frames.nearest(family.sample_frames(settings, total, frames.rate, video))
    frames_per_patch = config.vision.temporal_patch_size
    num_patches = -(-len(indices) // frames_per_patch)
    size, grid, rows = None, np.zeros(2, np.int32), []
    for frame in frames.read(indices):
        if size is None:
            size = _resized_size(family, settings, video, frame, len(indices))
        resized = resize_like_torch(frame, size.height, size.width)
        patches = to_patches(config, resized, max_tokens=MAX_CLIP_TOKENS)
        grid = np.asarray(patches.grid)
        rows.append(patches.values)
    rows += rows[-1:] * (num_patches * frames_per_patch - len(rows))
    values = np.stack(rows)
    slots, v = values.shape[1:]
    # From (patch, frame, slot, value) to (patch, slot, frame, value).
    values = values.reshape(num_patches, frames_per_patch, slots, v).transpose(0, 2, 1, 3)
    values = np.ascontiguousarray(values).reshape(num_patches, slots, frames_per_patch * v)
    pixels = Patches(values, np.tile(grid, (num_patches, 1)), np.ones(num_patches, bool))
    sampled_rate = len(indices) / total * frames.rate
    interval = family.time_interval(frames_per_patch / sampled_rate)
    return Clip(pixels, patch_times(frames, indices, frames_per_patch), interval)


def inspect_clip(family: Any, settings: VideoSettings, video: Video) -> ClipShape:
    """Returns the times and sizes of the frames that `read_clip` would read; see `read_clip`."""
    frames, vision = open_video(video), family.config.vision
    total = len(frames.times)
    indices = frames.nearest(family.sample_frames(settings, total, frames.rate, video))
    for frame in frames.read(indices[:1]):
        size = _resized_size(family, settings, video, frame, len(indices))
        times = patch_times(frames, indices, vision.temporal_patch_size)
        return ClipShape(times, (size.height // vision.factor, size.width // vision.factor))
    raise UserError(f"{video.name} has no frames")


def _resized_size(
    family: Any, settings: VideoSettings, video: Video, frame: Frame, num_frames: int
) -> FrameSize:
    """Returns the size of the resized frames of a video, and checks the number of its tokens.

    Args:
        family: the backbone, a `QwenBackbone`.
        settings: settings of the video processor.
        video: the video, for error messages.
        frame: a decoded frame of the video.
        num_frames: number of sampled frames.
    """
    vision = family.config.vision
    num_patches = -(-num_frames // vision.temporal_patch_size)
    with naming(video.name):
        old_size = FrameSize(*frame.shape[:2])
        # One frame is repeated, so it counts as a complete temporal patch.
        num_counted_frames = max(num_frames, vision.temporal_patch_size)
        size = family.video_size(settings, old_size, num_counted_frames)
        num_tokens = num_patches * size.height * size.width // vision.factor**2
        _check_tokens(num_tokens, num_frames)
    return size


def _check_tokens(num_tokens: int, num_frames: int) -> None:
    """Raises a UserError if a video has more than `MAX_CLIP_TOKENS` visual tokens."""
    if num_tokens > MAX_CLIP_TOKENS:
        raise UserError(
            f"{num_frames} frames have {num_tokens:,} visual tokens, expected at most "
            f"{MAX_CLIP_TOKENS:,}: sample fewer frames (fps or num_frames)"
        )
