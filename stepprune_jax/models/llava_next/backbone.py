"""LLaVA-NeXT (https://llava-vl.github.io/blog/2024-01-30-llava-next/): LLaVA on tiles.

The visual tokens of an image are the patches of the whole image, then those of its tiles, row by
row of all tiles, each row ended by the learned token `image_newline`. Before the projector, that
token is a vector of zeros, which no patch is.
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
from jaxtyping import Array, Float, Int
from PIL import Image

from stepprune_jax.models.attention import Tap
from stepprune_jax.models.backbone import Backbone
from stepprune_jax.models.config import Json, read_fields
from stepprune_jax.models.images import read_processor
from stepprune_jax.models.llava import Llava
from stepprune_jax.models.llava.images import LlavaImageSettings
from stepprune_jax.models.llava_next import images
from stepprune_jax.models.llava_next.config import CONTEXT, SIZES, LlavaNextConfig
from stepprune_jax.models.llava_next.images import BothSizes, Tiles
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
        # Kinds of tiles that are not supported begin with the same word.
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

    def describe(self, settings: LlavaImageSettings) -> Json:
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
            own = read_fields(raw, where, {"sizes": SIZES._replace(default=sizes)})["sizes"]
            require(own == sizes, f"{where}: {SIZES.field} is not that of config.json")
        if max_pixels is None:
            return self
        least = min(height * width for height, width in sizes)
        expected = f"an integer from {least}, the area of the smallest size"
        expect("max_pixels", max_pixels, is_count(max_pixels, least), expected)
        return self.replace(sizes=tuple(x for x in sizes if x[0] * x[1] <= max_pixels))

    def resize(self, settings: LlavaImageSettings, image: Image.Image) -> BothSizes:
        return images.resize(self.config, settings, image)

    def cut(self, image: BothSizes) -> Tiles:
        return images.to_tiles(image)

    def normalise(self, pixels: Tiles) -> Tiles:
        return pixels._replace(values=super().normalise(pixels.values))

    def max_pixels(self, count: int) -> Tiles:
        side, tiles = self.config.vision.image_size, self.config.max_tiles
        pair = jax.ShapeDtypeStruct((count, 2), np.int32)
        values = jax.ShapeDtypeStruct((count, tiles, 3, side, side), np.uint8)
        return Tiles(values, pair, pair)

    def list_pixels(self, width: int, height: int) -> list[Tiles]:
        del width, height  # there are few shapes
        side, patches, listed = self.config.vision.image_size, self.config.grid[0], []
        # Of the plans of a number of tiles, the one with the most rows has the most tokens.
        for tiles, plan in {math.prod(plan): plan for plan in sorted(self.config.plans)}.items():
            values = np.zeros((1, 1 + tiles, 3, side, side), np.uint8)
            # A narrow image has no row of patches in its tiles.
            for rows in (0, patches * plan[0]):
                grid = np.array([[rows, patches * plan[1]]], np.int32)
                listed.append(Tiles(values, grid, np.array([plan], np.int32)))
        return listed

    def grids(self, pixels: Tiles) -> Int[np.ndarray, "i 2"]:
        return np.asarray(pixels.grid, np.int32)

    def squared(self, pixels: Tiles) -> Tiles:
        plan = np.array(max(self.config.plans, key=lambda plan: (math.prod(plan), min(plan))))
        plan = np.broadcast_to(plan.astype(np.int32), pixels.plan.shape)
        return pixels._replace(grid=self.config.grid[0] * plan, plan=plan)

    def seen(self, settings: LlavaImageSettings, image: Image.Image) -> Image.Image:
        resized, patch = self.resize(settings, image), self.config.vision.patch_size
        height, width = (patch * max(1, int(length)) for length in resized.grid)
        top, left = (resized.padded.shape[1] - height) // 2, (resized.padded.shape[2] - width) // 2
        shown = resized.padded[:, top : top + height, left : left + width]
        return Image.fromarray(shown.transpose(1, 2, 0))

    def cells(
        self, grid: Sequence[int], tokens: Sequence[int] | Int[np.ndarray, "k"]
    ) -> Int[np.ndarray, "k"]:
        # A patch of the whole image is shown by the cell at its centre.
        base, side = self.config.vision.num_patches, self.config.grid[0]
        index, (rows, columns) = np.asarray(tokens, int), grid
        row, column = np.divmod(index - base, columns + 1)
        tiled = np.where(column < columns, row * columns + column, -1)
        down, across = (2 * x + 1 for x in np.divmod(index, side))
        whole = down * rows // (2 * side) * columns + across * columns // (2 * side)
        return np.where(index < 0, -1, np.where(index < base, whole, tiled))

    def num_tokens(self, grid: Int[Array | np.ndarray, "*b 2"]) -> Int[Array | np.ndarray, "*b"]:
        tiled = grid[..., 0] * (grid[..., 1] + 1)
        return (self.config.vision.num_patches + tiled).astype(np.int32)

    def padded_tokens(self, pixels: Tiles) -> int:
        return self.config.tokens_of(pixels.values.shape[1])

    def init_params(self, key: Array) -> Params:
        own, width = jax.random.fold_in(key, 1), self.config.text.hidden_size
        newline = jax.random.normal(own, (width,)) * width**-0.5
        return {**super().init_params(key), "newline": {"embedding": newline}}

    def encode_image(
        self,
        params: Params,
        pixels: Tiles,
        taps: Sequence[Tap] = (),
        execution: Execution = Execution(),
    ) -> tuple[Float[Array, "i n d"], dict[str, Array]]:
        # Taps have the class token of the whole image first, as those of LLaVA, then all tokens.
        (i, t), base = pixels.values.shape[:2], self.config.vision.num_patches
        values = jnp.reshape(cast(Array, pixels.values), (i * t, *pixels.values.shape[2:]))
        own = [tap for tap in taps if tap.kind != "tile"]
        features, tapped = super().encode_image(params, values, own, execution)
        place, shown = self._places(pixels)

        def laid_out(x: Array, axis: int, place: Array, shown: Array) -> Array:
            """Takes each token from those of all tiles, in place of its tile's axis."""
            x = jnp.moveaxis(x, axis, 1)
            x, wide = x.reshape(i, -1, *x.shape[2:]), (i, -1, *[1] * (x.ndim - 2))
            x = jnp.take_along_axis(x, place.reshape(wide), axis=1)
            return jnp.moveaxis(jnp.where(shown.reshape(wide), x, 0), 1, axis)

        tile, first = place // base, ((0, 0), (1, 0))
        behind = jnp.pad(place + tile + 1, first), jnp.pad(shown, first, constant_values=True)
        for name, tap in tapped.items():
            if name.startswith("query"):
                tapped[name] = tap.reshape(i, t, *tap.shape[1:])[:, 0]
            else:
                axis = 1 if name.startswith(("hidden", "received")) else 2
                at = behind if tap.shape[axis] > base else (place, shown)
                tapped[name] = laid_out(tap, axis, *at)
        tile = jnp.where(shown, tile, -1)
        tapped |= {f"{kind}.{layer}": tile for kind, layer in taps if kind == "tile"}
        return laid_out(features, 1, place, shown), tapped

    def _places(self, pixels: Tiles) -> tuple[Int[Array, "i n"], Array]:
        """Returns the place of each token among the patches of all tiles, and if it is a patch."""
        base, side = self.config.vision.num_patches, self.config.grid[0]
        token = jnp.arange(self.padded_tokens(pixels), dtype=jnp.int32)[None]
        grid, plan = (jnp.asarray(x, jnp.int32)[..., None] for x in (pixels.grid, pixels.plan))
        (rows, columns), (down, across) = grid.swapaxes(0, 1), plan.swapaxes(0, 1)
        row, column = (token - base) // (columns + 1), (token - base) % (columns + 1)
        shown = (token < base) | ((row < rows) & (column < columns))
        row, column = row + (down * side - rows) // 2, column + (across * side - columns) // 2
        tile = 1 + row // side * across + column // side
        place = jnp.where(token < base, token, tile * base + row % side * side + column % side)
        return jnp.where(shown, place, 0), shown

    def project(self, params: Params, features: Float[Array, "*b d"]) -> Float[Array, "*b e"]:
        projected, newline = super().project(params, features), params["newline"]["embedding"]
        is_newline = jnp.all(features == 0, axis=-1, keepdims=True)
        return jnp.where(is_newline, newline.astype(projected.dtype), projected)

    def vision_flops(self, grid: tuple[int, int]) -> dict[str, int]:
        # The fewest tiles that hold the grid.
        side, (rows, columns) = self.config.grid[0], grid
        tiles = 1 + -(-rows // side) * -(-columns // side)
        tile, patches = super().vision_flops(self.config.grid), side * side + rows * columns
        return {"tower": tiles * tile["tower"], "projector": tile["projector"] * patches // side**2}


class LlavaNextMistral(LlavaNext):
    """LLaVA-NeXT with Mistral's prompts."""

    @classmethod
    def conversation(cls, turns: Sequence[str | None], system: str | None = None) -> str:
        said = f"<<SYS>>\n{system}\n<</SYS>>\n\n" if system else ""
        text = ""
        for number, message in enumerate(turns):
            answer = f" {message} </s>" if message else ""
            text += answer if number % 2 else f"[INST] {message or ''} [/INST]"
        return text.replace("[INST] ", f"[INST] {said}", 1)

    @classmethod
    def published_prompts(cls, turns: Sequence[str]) -> tuple[str, ...]:
        # The Hugging Face files have the blank behind the end of an answer, older ones with a slip.
        text = cls.conversation(turns)
        return text, *(text.replace(" </s>", end) for end in ("</s> ", "<\\s> "))


class _Turns(LlavaNext):
    """LLaVA-NeXT with prompts of turns that all end with the same token.

    `BEGIN` precedes a turn and has a field for its role, `END` follows it, and `SYSTEM` is what the
    system says.
    """

    BEGIN: ClassVar[str]
    END: ClassVar[str]
    SYSTEM: ClassVar[str]

    @classmethod
    def conversation(cls, turns: Sequence[str | None], system: str | None = None) -> str:
        begin = [cls.BEGIN.format(role) for role in ("system", "user", "assistant")]
        text = begin[0] + (cls.SYSTEM if system is None else system) + cls.END
        for number, message in enumerate([*turns, None][: len(turns) + len(turns) % 2]):
            is_open = number % 2 == 1 and not message
            text += begin[1 + number % 2] + (message or "") + ("" if is_open else cls.END)
        return text

    @classmethod
    def published_prompts(cls, turns: Sequence[str]) -> tuple[str, ...]:
        # The template of the Hugging Face files has no words of the system.
        text = cls.conversation(turns)
        return text, text.removeprefix(cls.BEGIN.format("system") + cls.SYSTEM + cls.END)


class LlavaNextLlama3(_Turns):
    """LLaVA-NeXT with the prompts of Llama 3 Instruct."""

    BEGIN, END = "<|start_header_id|>{}<|end_header_id|>\n\n", "<|eot_id|>"
    SYSTEM = (
        "You are a helpful language and vision assistant. You are able to understand the visual "
        "content that the user provides, and assist the user with a variety of tasks using natural "
        "language."
    )


class LlavaNextYi(_Turns):
    """LLaVA-NeXT with the prompts of the 34B, whose language model is a Yi."""

    BEGIN, END = "<|im_start|>{}\n", "<|im_end|>"
    SYSTEM = "Answer the questions."


_BY_PROMPTS = {
    "vicuna": LlavaNext,
    "mistral": LlavaNextMistral,
    "llama_3": LlavaNextLlama3,
    "yi": LlavaNextYi,
}
