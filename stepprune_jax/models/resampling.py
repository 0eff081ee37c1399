"""Bicubic resizing of bytes with the integer arithmetic of torch.

The video processors of `transformers` resize frames with torch. Torch rounds the weights of the
filter to 16 bits, Pillow to 22 bits, so the two results differ in the last bit of some pixels. This
module gives the bytes of torch: ``torch.nn.functional.interpolate`` with ``mode="bicubic"`` and
``antialias=True`` of a uint8 tensor.
"""

import functools
from typing import NamedTuple

import numpy as np
from jaxtyping import Float, UInt8

# Number of output pixels that share one matrix product. A larger block multiplies more zeros.
_BLOCK_SIZE = 32
# Weights fit into 16 bits with sign, and have at most this number of fractional bits.
_MAX_WEIGHT, _MAX_PRECISION = 1 << 15, 22
_BICUBIC_SUPPORT = 2.0  # half the width of the filter in pixels


class _Block(NamedTuple):
    """Weights of `_BLOCK_SIZE` consecutive output pixels.

    Attributes:
        first_input: index of the first input pixel that an output pixel of the block reads.
        weights: [inputs, outputs] integer weights, as float64.
    """

    first_input: int
    weights: Float[np.ndarray, "inputs outputs"]


class _Filter(NamedTuple):
    """Weights for resizing a line of pixels.

    Attributes:
        blocks: the weights, from the first output pixel to the last.
        precision: number of fractional bits of the weights.
    """

    blocks: tuple[_Block, ...]
    precision: int


def _bicubic(x: Float[np.ndarray, "k"]) -> Float[np.ndarray, "k"]:
    """Computes Keys' cubic filter with a = -1/2 at distances `x` in pixels."""
    x, a = np.abs(x), -0.5
    near = ((a + 2) * x - (a + 3)) * x * x + 1
    far = (((x - 5) * x + 8) * x - 4) * a
    return np.where(x < 1, near, np.where(x < 2, far, 0.0))


@functools.lru_cache(64)
def _make_filter(input_size: int, output_size: int) -> _Filter:
    """Computes the rounded weights for resizing a line of `input_size` pixels."""
    scale = input_size / output_size
    stretch = max(scale, 1.0)  # reducing a line widens the filter, against aliasing
    support = _BICUBIC_SUPPORT * stretch
    starts, lines = [], []
    for output in range(output_size):
        center = scale * (output + 0.5)
        start = max(int(center - support + 0.5), 0)
        end = min(int(center + support + 0.5), input_size)
        values = _bicubic((np.arange(start, end) - center + 0.5) / stretch)
        # The order of this sum is the order of torch.
        lines.append(values / sum(values.tolist()))
        starts.append(start)
    largest = max(float(line.max()) for line in lines)
    precision = 0
    while precision < _MAX_PRECISION and int(0.5 + largest * (2 << precision)) < _MAX_WEIGHT:
        precision += 1
    blocks = []
    for first_output in range(0, output_size, _BLOCK_SIZE):
        outputs = range(first_output, min(first_output + _BLOCK_SIZE, output_size))
        first_input = starts[first_output]
        end_input = max(starts[output] + len(lines[output]) for output in outputs)
        weights = np.zeros((end_input - first_input, len(outputs)))
        for column, output in enumerate(outputs):
            rounded = np.trunc(lines[output] * (1 << precision) + np.copysign(0.5, lines[output]))
            start = starts[output] - first_input
            weights[start : start + len(rounded), column] = rounded
        blocks.append(_Block(first_input, weights))
    return _Filter(tuple(blocks), precision)


def _resize_lines(lines: UInt8[np.ndarray, "k m"], size: int) -> UInt8[np.ndarray, "k size"]:
    """Resizes k lines of m bytes to lines of `size` bytes."""
    if lines.shape[1] == size:
        return lines
    resizing = _make_filter(lines.shape[1], size)
    resized, first_output = np.empty((len(lines), size), np.uint8), 0
    for first_input, weights in resizing.blocks:
        num_inputs, num_outputs = weights.shape
        inputs = lines[:, first_input : first_input + num_inputs].astype(np.float64)
        # Sums of integers below 2^53 are exact in float64, in any order.
        sums = inputs @ weights
        rounded = np.floor((sums + (1 << resizing.precision >> 1)) / (1 << resizing.precision))
        resized[:, first_output : first_output + num_outputs] = np.clip(rounded, 0, 255)
        first_output += num_outputs
    return resized


def resize_like_torch(
    frame: UInt8[np.ndarray, "height width 3"], height: int, width: int
) -> UInt8[np.ndarray, "3 new_height new_width"]:
    """Resizes a frame as torch does, first along its rows and then along its columns.

    Args:
        frame: [height, width, 3] bytes.
        height: new height in pixels.
        width: new width in pixels.

    Returns:
        [3, height, width] bytes.
    """
    old_height, old_width = frame.shape[:2]
    channels = np.ascontiguousarray(frame.transpose(2, 0, 1))
    lines = _resize_lines(channels.reshape(3 * old_height, old_width), width)
    columns = lines.reshape(3, old_height, width).transpose(0, 2, 1).reshape(3 * width, old_height)
    columns = _resize_lines(np.ascontiguousarray(columns), height)
    return np.ascontiguousarray(columns.reshape(3, width, height).transpose(0, 2, 1))
