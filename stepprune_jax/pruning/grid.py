"""A uniform grid: keeps tokens that are spread evenly over the image."""

import dataclasses
from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Int

from stepprune_jax.models.config import ModelConfig
from stepprune_jax.pruning.base import Kept, Pruner, PrunerInputs, take
from stepprune_jax.pruning.ordering import require_grid


@dataclasses.dataclass(frozen=True)
class Grid(Pruner):
    """Keeps tokens that are spread evenly over rows and columns, and over the time of a video."""

    name = "grid"
    label = "grid"

    def check(self, config: ModelConfig, num_tokens: int) -> None:
        """Also rejects models that split images into tiles."""
        super().check(config, num_tokens)
        require_grid(config, self.name)

    def keep(self, inputs: PrunerInputs, capacity: int) -> Kept:
        """Keeps `inputs.count` evenly spread tokens of each image."""
        if inputs.frames is None:
            order = grid_indices(inputs.grid, inputs.count, capacity)
        else:
            order = video_indices(inputs.grid, inputs.frames, inputs.count, capacity)
        return take(inputs.whole, order, inputs.count, capacity)


class LinePlaces(NamedTuple):
    """Places of points that `arrange_in_lines` arranges in horizontal lines.

    Attributes:
        line: [r, k] line of each point, counted from the top.
        num_lines: [r, 1] number of lines of each image.
        index_in_line: [r, k] index of each point in its line, counted from the left.
        line_length: [r, k] number of points in the line of each point.
    """

    line: Int[Array, "r k"]
    num_lines: Int[Array, "r 1"]
    index_in_line: Int[Array, "r k"]
    line_length: Int[Array, "r k"]


def grid_indices(
    grid: Int[Array, "r 2"], count: Int[Array, "r"], capacity: int
) -> Int[Array, "r k"]:
    """Returns the raster indices of `count` tokens that are spread evenly over each image.

    The tokens lie on horizontal lines, see `arrange_in_lines`. The lines are spread evenly over the
    height, and the tokens of a line are spread evenly over the width. If two columns are equally
    near to the ideal position, odd lines take the left column and even lines the right column.

    Args:
        grid: [r, 2] height and width of each of r images, in tokens.
        count: [r] number of tokens to return for each image.
        capacity: static size k of the result, at least every count.

    Returns:
        [r, k] int32 indices in ascending order. Only the first `count` entries are defined.
    """
    return _indices_of_points(grid, count, jnp.arange(capacity)[None])


def video_indices(
    grid: Int[Array, "r 2"], frames: Int[Array, "r"], count: Int[Array, "r"], capacity: int
) -> Int[Array, "r k"]:
    """Returns the raster indices of `count` tokens that are spread evenly over each video.

    The temporal patches share the count evenly: patch t gets floor((t + 1) count / T) - floor(t
    count / T) of T patches. Its tokens are spread by `grid_indices`.

    Args:
        grid: [r, 2] rows of all temporal patches, and columns.
        frames: [r] number T of temporal patches.
        count: [r] number of tokens to return.
        capacity: static size k of the result, at least every count.
    """
    frames, count = jnp.maximum(frames, 1)[:, None], jnp.maximum(count, 1)[:, None]
    point = jnp.arange(capacity)[None]
    # The first patch whose tokens and earlier tokens include the point.
    patch = jnp.minimum(-(-(point + 1) * frames // count) - 1, frames - 1)
    first_point, next_point = patch * count // frames, (patch + 1) * count // frames
    patch_rows, columns = grid[:, :1] // frames, grid[:, 1:]

    def flatten(values: Int[Array, "#r #k"]) -> Int[Array, "p"]:
        return jnp.broadcast_to(values, patch.shape).reshape(-1)

    # Patches differ in their counts, so each point has the grid of its patch.
    patch_grid = jnp.stack([flatten(patch_rows), flatten(columns)], axis=1)
    in_patch = flatten(point - first_point)[:, None]
    index = _indices_of_points(patch_grid, flatten(next_point - first_point), in_patch)
    return index.reshape(patch.shape) + (patch * patch_rows * columns).astype(jnp.int32)


def _indices_of_points(
    grid: Int[Array, "r 2"], count: Int[Array, "r"], point: Int[Array, "#r k"]
) -> Int[Array, "r k"]:
    """Returns the raster indices of some points of `grid_indices`.

    Args:
        grid: [r, 2] height and width of each of r images, in tokens.
        count: [r] number of points of each image.
        point: [r or 1, k] numbers of the points.
    """
    height, width = grid[:, :1], grid[:, 1:]
    line, num_lines, index_in_line, line_length = arrange_in_lines(grid, count, point)
    # The row at the center of the line's band: floor((line + 1/2) * height / num_lines).
    row = (2 * line + 1) * height // (2 * num_lines)
    # The center of a token's cell is x = (index_in_line + 1/2) * width / line_length, where column
    # c covers [c, c + 1). If x is an integer, floor(x) is the column on its right and ceil(x) - 1
    # the column on its left; otherwise both are the same column.
    numerator, denominator = (2 * index_in_line + 1) * width, 2 * line_length
    floor, ceil = numerator // denominator, -(-numerator // denominator)
    column = jnp.where(line % 2 == 0, floor, ceil - 1)
    return (row * width + column).astype(jnp.int32)


def arrange_in_lines(
    grid: Int[Array, "r 2"], count: Int[Array, "r"], point: Int[Array, "#r k"]
) -> LinePlaces:
    """Arranges points in horizontal lines whose lengths differ by at most one.

    The number of lines is sqrt(count * height / width), rounded to an integer. The points then have
    about the same distance along rows and along columns.

    Args:
        grid: [r, 2] height and width of each of r images, in tokens.
        count: [r] number of points of each image.
        point: [r or 1, k] indices of the points to place, from 0 to `count` - 1. Points are
            numbered line by line.

    Returns:
        The place of each point. Places of points from `count` on are undefined.
    """
    height, width, count = grid[:, :1], grid[:, 1:], count[:, None]
    # A line has at most `width` points, so there are at least ceil(count / width) lines.
    min_lines = jnp.maximum(-(-count // width), 1)
    ideal_lines = jnp.round(jnp.sqrt(count * height / width)).astype(jnp.int32)
    num_lines = jnp.minimum(jnp.maximum(ideal_lines, min_lines), jnp.minimum(height, count))
    # Line l begins at point floor(count * l / num_lines). The line of a point is therefore
    # ceil((point + 1) * num_lines / count) - 1.
    line = -(-(point + 1) * num_lines // count) - 1
    first_point = count * line // num_lines
    line_length = jnp.maximum(count * (line + 1) // num_lines - first_point, 1)
    return LinePlaces(line, num_lines, point - first_point, line_length)
