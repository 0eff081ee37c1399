"""The video processors of `transformers`, without torchvision, and inputs of its models."""

import contextlib
import importlib
import sys
import types
from types import ModuleType, SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import torch
from transformers.image_processing_backends import TorchvisionBackend
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import smart_resize
from transformers.video_utils import VideoMetadata

_FUNCTIONAL = "torchvision.transforms.v2.functional"
# `transformers` takes an unknown rate as 24 frames per second.
DEFAULT_RATE = 24


@contextlib.contextmanager
def empty_torchvision():
    """Replaces torchvision by empty modules, because only resizing would call them."""
    names = ["torchvision", "torchvision.transforms", "torchvision.transforms.v2", _FUNCTIONAL]
    modules = {name: ModuleType(name) for name in names if name not in sys.modules}
    sys.modules.update(modules)
    for name in modules:
        parent, _, child = name.rpartition(".")
        if parent:
            setattr(sys.modules[parent], child, sys.modules[name])
    try:
        yield
    finally:
        for name in modules:
            del sys.modules[name]


with empty_torchvision():
    qwen2, qwen3, _processing = (
        importlib.import_module(f"transformers.models.{name}")
        for name in (
            "qwen2_vl.video_processing_qwen2_vl",
            "qwen3_vl.video_processing_qwen3_vl",
            "qwen3_vl.processing_qwen3_vl",
        )
    )
Qwen3VLProcessor = _processing.Qwen3VLProcessor


class Processed(NamedTuple):
    """A video after the reference's processor.

    Attributes:
        pixels: [patches, values] normalized values.
        grid: [1, 3] temporal patches, rows and columns of patches.
        seconds: seconds between two temporal patches.
        metadata: rate and indices of the frames.
    """

    pixels: torch.Tensor
    grid: torch.Tensor
    seconds: float
    metadata: VideoMetadata


def sample(is_qwen3: bool, total: int, rate: float, settings: Any, **options: Any) -> list[int]:
    """Returns the indices of the frames that a video processor samples."""
    module = qwen3 if is_qwen3 else qwen2
    kind = module.Qwen3VLVideoProcessor if is_qwen3 else module.Qwen2VLVideoProcessor
    defaults = {"temporal_patch_size": 2, "num_frames": None, "fps": None}
    limits = {"min_frames": settings.min_frames, "max_frames": settings.max_frames}
    processor = SimpleNamespace(**(defaults | limits))
    metadata = VideoMetadata(total_num_frames=total, fps=rate)
    return kind.sample_frames(processor, metadata=metadata, **options).tolist()


def process(
    is_qwen3: bool,
    config: Any,
    settings: Any,
    frames: np.ndarray,
    metadata: VideoMetadata,
) -> Processed:
    """Resizes and normalizes sampled frames, and cuts them into patches."""
    vision = config.vision
    num_frames, height, width, _ = frames.shape
    bounds = {"min_pixels": settings.min_pixels, "max_pixels": settings.max_pixels}
    if is_qwen3:
        size = qwen3.smart_resize(num_frames, height, width, 2, vision.factor, **bounds)
    else:
        size = smart_resize(height, width, vision.factor, **bounds)
    video = torch.from_numpy(frames.copy()).permute(0, 3, 1, 2).contiguous()
    if size != (height, width):
        video = torch.nn.functional.interpolate(video, size=size, mode="bicubic", antialias=True)
    normalisation = config.normalisation
    mean, std, _ = TorchvisionBackend._fuse_mean_std_and_rescale_factor(
        None, True, normalisation.mean, normalisation.std, True, normalisation.rescale
    )
    video = (video.float() - mean[:, None, None]) / std[:, None, None]
    patches, *grid = qwen3.Qwen3VLVideoProcessor.patchify(
        None, video[None], vision.patch_size, vision.merge_size, vision.temporal_patch_size
    )
    seconds = vision.temporal_patch_size / metadata.sampled_fps
    return Processed(patches[0], torch.tensor([grid]), seconds, metadata)


def video_text(is_qwen3: bool, processed: Processed, unit: int) -> str:
    """Returns the text of a prompt in place of a video, with a token for each visual token."""
    if not is_qwen3:
        pads = "<|video_pad|>" * (int(processed.grid.prod()) // unit)
        return f"<|vision_start|>{pads}<|vision_end|>"
    processor = types.SimpleNamespace(
        video_processor=SimpleNamespace(merge_size=2, temporal_patch_size=2),
        video_token="<|video_pad|>",
        vision_start_token="<|vision_start|>",
        vision_end_token="<|vision_end|>",
    )
    calculate = Qwen3VLProcessor._calculate_timestamps
    processor._calculate_timestamps = lambda *arguments: calculate(processor, *arguments)
    inputs = {"video_grid_thw": processed.grid, "video_metadata": [processed.metadata]}
    return Qwen3VLProcessor.replace_video_token(processor, inputs, 0)
