"""LLaVA-NeXT (https://llava-vl.github.io/blog/2024-01-30-llava-next/): LLaVA on tiles of images.

The visual tokens of an image are the patches of its overview, followed by the patches of its tiles.
The tiles form one grid of patches, which is read row by row; each row ends with the learned newline
token `image_newline`. Before the projector, the newline token is a vector of zeros. No patch is a
vector of zeros.
"""

import dataclasses
import math
from collections.abc import Sequence
from pathlib import Path
from typing import ClassVar, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Bool, Float, Int
from PIL import Image

from stepprune_jax.models.attention import Tap
from stepprune_jax.models.backbone import Backbone
from stepprune_jax.models.config import Json, read_fields
from stepprune_jax.models.images import read_processor
from stepprune_jax.models.llava import Llava
from stepprune_jax.models.llava.images import LlavaImageSettings
from stepprune_jax.models.llava_next import images
from stepprune_jax.models.llava_next.config import CONTEXT, SIZES, LlavaNextConfig
from stepprune_jax.models.llava_next.images import ResizedVersions, Tiles
from stepprune_jax.models.stack import Execution, Params
from stepprune_jax.models.weights import WeightRule
from stepprune_jax.settings import is_count
from stepprune_jax.user_input import expect, require

_NEWLINE = "image_newline"


@dataclasses.dataclass(frozen=True)
class LlavaNext(Llava):
    """LLaVA-NeXT with Vicuna's prompts, in the Hugging Face layout or the original one."""

    config: LlavaNextConfig
    name = "llava_next"
    CONFIG = LlavaNextConfig
    SUPPORTED = (
        "LLaVA-NeXT (v1.6) with a Vicuna, Mistral, Yi or Llama 3 in the Hugging Face layout "
        "(model_type 'llava_next') or in the original one (image_aspect_ratio 'anyres')"
    )
    CONTEXT_LIMIT = CONTEXT
    PROCESSOR = "LlavaNextProcessor"
    SHARDING_RULES = (*Llava.SHARDING_RULES, (r"newline/embedding", P()))

    @classmethod
    def matches(cls, raw: Json) -> bool:
        # Unsupported kinds of tiles also begin with "anyres"; `read` rejects them.
        is_tiled = str(raw.get("image_aspect_ratio")).startswith("anyres") and Llava.matches(raw)
        return is_tiled or raw.get("model_type") == "llava_next"

    @classmethod
    def read(cls, raw: Json, vision: Json | None) -> Backbone:
        if vision is None:
            config = LlavaNextConfig.from_hf(raw)
        else:
            config = LlavaNextConfig.from_original(raw, vision)
        return _BY_PROMPTS[config.prompts](config)

    @classmethod
    def canonical_name(cls, name: str, of_vision_folder: bool = False) -> str | None:
        if name in (_NEWLINE, f"model.{_NEWLINE}"):
            return _NEWLINE
        return super().canonical_name(name, of_vision_folder)

    def weight_rules(self) -> tuple[WeightRule, ...]:
        return (*super().weight_rules(), WeightRule("newline/embedding", _NEWLINE))

    @classmethod
    def image_settings(cls, folder: str | Path) -> LlavaImageSettings:
        return images.settings_from_hf(*read_processor(folder))

    def hf_image_processor(self, settings: LlavaImageSettings) -> Json:
        return images.to_hf(settings, self.config.normalisation, self.config.sizes)

    def bound_images(
        self,
        folder: str | Path | None,
        min_pixels: int | None = None,
        max_pixels: int | None = None,
    ) -> Backbone:
        side, sizes = self.config.vision.image_size, self.config.sizes
        expect("min_pixels", min_pixels, min_pixels is None, "none, as this model has fixed sizes")
        if folder is not None:
            raw, where = read_processor(folder)
            crop = images.settings_from_hf(raw, where).crop_to
            require(crop == side, f"{where}: crop_size is {crop}, the model takes {side}")
            rules = {"sizes": SIZES._replace(default=sizes)}
            processor_sizes = read_fields(raw, where, rules)["sizes"]
            is_equal = processor_sizes == sizes
            require(is_equal, f"{where}: {SIZES.field} is not that of config.json")
        if max_pixels is None:
            return self
        smallest_area = min(height * width for height, width in sizes)
        expected = f"an integer from {smallest_area}, the area of the smallest size"
        expect("max_pixels", max_pixels, is_count(max_pixels, smallest_area), expected)
        return self.replace(sizes=tuple(size for size in sizes if math.prod(size) <= max_pixels))

    def resize(self, settings: LlavaImageSettings, image: Image.Image) -> ResizedVersions:
        return images.resize(self.config, settings, image)

    def to_pixels(self, image: ResizedVersions) -> Tiles:
        return images.to_tiles(image)

    def normalise(self, pixels: Tiles) -> Tiles:
        return pixels._replace(values=super().normalise(pixels.values))

    def largest_pixel_shapes(self, count: int) -> Tiles:
        side, tiles = self.config.vision.image_size, self.config.max_tiles
        pair = jax.ShapeDtypeStruct((count, 2), np.int32)
        values = jax.ShapeDtypeStruct((count, tiles, 3, side, side), np.uint8)
        return Tiles(values, pair, pair)

    def list_example_pixels(self, width: int, height: int) -> list[Tiles]:
        del width, height  # the model has few shapes, so all are listed
        side, patches_per_side = self.config.vision.image_size, self.config.grid[0]
        # Among tile grids with the same number of tiles, the grid with the most rows has the most
        # tokens, because each row of patches adds a newline. Sorting puts this grid last.
        largest_grids = {math.prod(grid): grid for grid in sorted(self.config.tile_grids)}
        examples = []
        for num_tiles, (tile_rows, tile_columns) in largest_grids.items():
            values = np.zeros((1, 1 + num_tiles, 3, side, side), np.uint8)
            # The tiles of an extremely narrow image contain no row of patches.
            for rows in (0, patches_per_side * tile_rows):
                grid = np.array([[rows, patches_per_side * tile_columns]], np.int32)
                tile_grid = np.array([[tile_rows, tile_columns]], np.int32)
                examples.append(Tiles(values, grid, tile_grid))
        return examples

    def grids(self, pixels: Tiles) -> Int[np.ndarray, "i 2"]:
        return np.asarray(pixels.grid, np.int32)

    def with_square_grids(self, pixels: Tiles) -> Tiles:
        tile_grids = self.config.tile_grids
        tile_grid = np.array(max(tile_grids, key=lambda grid: (math.prod(grid), min(grid))))
        tile_grid = np.broadcast_to(tile_grid.astype(np.int32), pixels.tile_grid.shape)
        return pixels._replace(grid=self.config.grid[0] * tile_grid, tile_grid=tile_grid)

    def visible_image(self, settings: LlavaImageSettings, image: Image.Image) -> Image.Image:
        resized, patch_size = self.resize(settings, image), self.config.vision.patch_size
        height, width = (patch_size * max(1, int(length)) for length in resized.grid)
        top, left = (resized.padded.shape[1] - height) // 2, (resized.padded.shape[2] - width) // 2
        unpadded = resized.padded[:, top : top + height, left : left + width]
        return Image.fromarray(unpadded.transpose(1, 2, 0))

    def token_cells(
        self, grid: Sequence[int], tokens: Sequence[int] | Int[np.ndarray, "k"]
    ) -> Int[np.ndarray, "k"]:
        num_overview_tokens, side = self.config.vision.num_patches, self.config.grid[0]
        index, (rows, columns) = np.asarray(tokens, int), grid
        # A row of the larger version ends with a newline token, which shows no cell.
        row, column = np.divmod(index - num_overview_tokens, columns + 1)
        tile_cell = np.where(column < columns, row * columns + column, -1)
        # A patch of the overview is mapped to the cell at its center, (y + 1/2) * rows / side.
        overview_y, overview_x = np.divmod(index, side)
        row = (2 * overview_y + 1) * rows // (2 * side)
        column = (2 * overview_x + 1) * columns // (2 * side)
        overview_cell = row * columns + column
        cells = np.where(index < num_overview_tokens, overview_cell, tile_cell)
        return np.where(index < 0, -1, cells)

    def num_tokens(self, grid: Int[Array | np.ndarray, "*b 2"]) -> Int[Array | np.ndarray, "*b"]:
        tile_tokens = grid[..., 0] * (grid[..., 1] + 1)
        return (self.config.vision.num_patches + tile_tokens).astype(np.int32)

    def num_padded_tokens(self, pixels: Tiles) -> int:
        return self.config.max_tokens_of_tiles(pixels.values.shape[1])

    def init_params(self, key: Array) -> Params:
        newline_key, width = jax.random.fold_in(key, 1), self.config.text.hidden_size
        newline = jax.random.normal(newline_key, (width,)) * width**-0.5
        return {**super().init_params(key), "newline": {"embedding": newline}}

    def encode_image(
        self,
        params: Params,
        pixels: Tiles,
        taps: Sequence[Tap] = (),
        execution: Execution = Execution(),
    ) -> tuple[Float[Array, "i n d"], dict[str, Array]]:
        # If the taps of LLaVA contain a class token, the class token of the overview comes first
        # here, followed by all tokens of the image.
        (i, t), num_patches = pixels.values.shape[:2], self.config.vision.num_patches
        values = jnp.reshape(cast(Array, pixels.values), (i * t, *pixels.values.shape[2:]))
        tower_taps = [tap for tap in taps if tap.kind != "tile"]
        features, tapped = super().encode_image(params, values, tower_taps, execution)
        patch, is_patch = self.source_patches(pixels)
        tile = patch // num_patches
        # In taps with a class token in front of the patches of each tile, patch p of tile t has the
        # index p + t + 1. The class token of the overview has the index 0.
        pad_first = ((0, 0), (1, 0))
        token = jnp.pad(patch + tile + 1, pad_first)
        is_token = jnp.pad(is_patch, pad_first, constant_values=True)
        for name, tap in tapped.items():
            if name.startswith("query"):
                tapped[name] = tap.reshape(i, t, *tap.shape[1:])[:, 0]
                continue
            axis = 1 if name.startswith(("hidden", "received")) else 2
            if tap.shape[axis] > num_patches:
                tapped[name] = _gather_tokens(tap, axis, token, is_token)
            else:
                tapped[name] = _gather_tokens(tap, axis, patch, is_patch)
        tile = jnp.where(is_patch, tile, -1)
        tapped |= {f"{kind}.{layer}": tile for kind, layer in taps if kind == "tile"}
        return _gather_tokens(features, 1, patch, is_patch), tapped

    def source_patches(self, pixels: Tiles) -> tuple[Int[Array, "i n"], Bool[Array, "i n"]]:
        """Returns the patch of each token, and whether the token is a patch.

        The tokens of an image are the patches of its overview, then the rows of its larger version
        without padding. Each row ends with a newline token.

        Args:
            pixels: tiles of i images.

        Returns:
            [i, n] index of each token's patch, counted over all tiles of the image from the
            overview on; 0 for newline tokens and padding. [i, n] False for newline tokens and
            padding.
        """
        # `num_patches` and `side` describe one tile: side x side patches.
        num_patches, side = self.config.vision.num_patches, self.config.grid[0]
        token = jnp.arange(self.num_padded_tokens(pixels), dtype=jnp.int32)[None]
        rows, columns = jnp.asarray(pixels.grid, jnp.int32)[..., None].swapaxes(0, 1)
        tile_rows, tile_columns = jnp.asarray(pixels.tile_grid, jnp.int32)[..., None].swapaxes(0, 1)
        # A row of the larger version has `columns` patches and a newline token.
        row = (token - num_patches) // (columns + 1)
        column = (token - num_patches) % (columns + 1)
        is_patch = (token < num_patches) | ((row < rows) & (column < columns))
        # The image is centered on the tiles, so the padding in front of it is skipped.
        row += (tile_rows * side - rows) // 2
        column += (tile_columns * side - columns) // 2
        tile = 1 + row // side * tile_columns + column // side
        tile_patch = tile * num_patches + row % side * side + column % side
        patch = jnp.where(token < num_patches, token, tile_patch)
        return jnp.where(is_patch, patch, 0), is_patch

    def project(self, params: Params, features: Float[Array, "*b d"]) -> Float[Array, "*b e"]:
        projected, newline = super().project(params, features), params["newline"]["embedding"]
        is_newline = jnp.all(features == 0, axis=-1, keepdims=True)
        return jnp.where(is_newline, newline.astype(projected.dtype), projected)

    def vision_flops(self, grid: tuple[int, int]) -> dict[str, int]:
        # The grid is cut into the smallest number of tiles that covers it.
        side, (rows, columns) = self.config.grid[0], grid
        num_tiles = 1 + -(-rows // side) * -(-columns // side)
        num_patches = side * side + rows * columns
        flops_per_tile = super().vision_flops(self.config.grid)
        projector = flops_per_tile["projector"] * num_patches // side**2
        return {"tower": num_tiles * flops_per_tile["tower"], "projector": projector}


def _gather_tokens(
    x: Array, axis: int, index: Int[Array, "i n"], is_valid: Bool[Array, "i n"]
) -> Array:
    """Gathers an image's tokens from the tokens of its tiles.

    Args:
        x: array whose axis 0 enumerates the tiles of all images, and whose `axis` enumerates the
            tokens of a tile.
        axis: axis of the tokens of a tile, at least 1.
        index: [i, n] number of each token among the concatenated tokens of its image's tiles.
        is_valid: [i, n] False for tokens that are zeros.

    Returns:
        The array with axis 0 for the i images and n tokens along `axis`.
    """
    x = jnp.moveaxis(x, axis, 1)
    x = x.reshape(len(index), -1, *x.shape[2:])
    broadcast_shape = (*index.shape, *[1] * (x.ndim - 2))
    x = jnp.take_along_axis(x, index.reshape(broadcast_shape), axis=1)
    x = jnp.where(is_valid.reshape(broadcast_shape), x, 0)
    return jnp.moveaxis(x, 1, axis)


class LlavaNextMistral(LlavaNext):
    """LLaVA-NeXT with Mistral's prompts."""

    @classmethod
    def conversation(cls, turns: Sequence[str | None], system: str | None = None) -> str:
        system_prompt = f"<<SYS>>\n{system}\n<</SYS>>\n\n" if system else ""
        text = ""
        for turn, message in enumerate(turns):
            answer = f" {message} </s>" if message else ""
            text += answer if turn % 2 else f"[INST] {message or ''} [/INST]"
        return text.replace("[INST] ", f"[INST] {system_prompt}", 1)

    @classmethod
    def published_prompts(cls, turns: Sequence[str]) -> tuple[str, ...]:
        # The templates of the Hugging Face files put the space after the end token. Older files
        # misspell the end token.
        text = cls.conversation(turns)
        return text, *(text.replace(" </s>", end) for end in ("</s> ", "<\\s> "))


class _DelimitedTurns(LlavaNext):
    """LLaVA-NeXT with prompts whose turns, including the system prompt, have the same delimiters.

    Attributes:
        BEGIN: text in front of a turn, with a format field for the role.
        END: text after a turn.
        SYSTEM: the template's system prompt.
    """

    BEGIN: ClassVar[str]
    END: ClassVar[str]
    SYSTEM: ClassVar[str]

    @classmethod
    def conversation(cls, turns: Sequence[str | None], system: str | None = None) -> str:
        system = cls.SYSTEM if system is None else system
        text = cls.BEGIN.format("system") + system + cls.END
        for turn, message in enumerate([*turns, None][: len(turns) + len(turns) % 2]):
            is_assistant = turn % 2 == 1
            role = "assistant" if is_assistant else "user"
            end = "" if is_assistant and not message else cls.END
            text += cls.BEGIN.format(role) + (message or "") + end
        return text

    @classmethod
    def published_prompts(cls, turns: Sequence[str]) -> tuple[str, ...]:
        # The chat template of the Hugging Face files has no system prompt.
        text = cls.conversation(turns)
        return text, text.removeprefix(cls.BEGIN.format("system") + cls.SYSTEM + cls.END)


class LlavaNextLlama3(_DelimitedTurns):
    """LLaVA-NeXT with the prompts of Llama 3 Instruct."""

    BEGIN, END = "<|start_header_id|>{}<|end_header_id|>\n\n", "<|eot_id|>"
    SYSTEM = (
        "You are a helpful language and vision assistant. You are able to understand the visual "
        "content that the user provides, and assist the user with a variety of tasks using natural "
        "language."
    )


class LlavaNextYi(_DelimitedTurns):
    """LLaVA-NeXT with the prompts of the 34B model, whose language model is a Yi."""

    BEGIN, END = "<|im_start|>{}\n", "<|im_end|>"
    SYSTEM = "Answer the questions."


_BY_PROMPTS = {
    "vicuna": LlavaNext,
    "mistral": LlavaNextMistral,
    "llama_3": LlavaNextLlama3,
    "yi": LlavaNextYi,
}
