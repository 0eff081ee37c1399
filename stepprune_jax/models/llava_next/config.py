"""Configuration of LLaVA-NeXT: LLaVA's configuration, the image sizes and the prompt template."""

import dataclasses
from typing import Any

from stepprune_jax.models.config import (
    LLAMA,
    FieldRule,
    Json,
    choice_rule,
    object_rule,
    read_fields,
)
from stepprune_jax.models.llava.config import LlavaConfig
from stepprune_jax.settings import is_count
from stepprune_jax.user_input import naming, require

# The longest sequence of the model's training. The tokens of the largest image must fit it.
CONTEXT = 4096

Sizes = tuple[tuple[int, int], ...]


def _read_sizes(value: Any) -> Sizes | None:
    """Reads a list of pairs of sides; returns None for any other value."""
    try:
        pairs = tuple((height, width) for height, width in value)
    except (TypeError, ValueError):
        return None
    return pairs if pairs and all(is_count(side) for pair in pairs for side in pair) else None


SIZES = FieldRule(
    "image_grid_pinpoints",
    ((336, 672), (672, 336), (672, 672), (1008, 336), (336, 1008)),
    _read_sizes,
    "a list of at least one pair of sides in pixels",
)
_ORIGINAL_ONLY = {
    "aspect": choice_rule("image_aspect_ratio", "anyres"),
    "merge": choice_rule("mm_patch_merge_type", None, "spatial_unpad"),
}
# Values of these fields for LLaVA-1.5, whose rules check all other fields.
_LLAVA_FIELDS = {"image_aspect_ratio": "square", "mm_patch_merge_type": "flat"}
# Mistral is a Llama with these defaults and a sliding window, which the supported 7B does not use.
_MISTRAL = {"intermediate_size": 14336, "num_key_value_heads": 8, "max_position_embeddings": 131072}
# Vocabulary sizes that identify the language model, and thereby the prompt template.
_VOCABULARY_SIZES = {"llama_3": 128_256, "yi": 64_000}
# Files may pad the vocabulary by up to this number of rows.
_MAX_PADDING_ROWS = 64
# Ids of the tokens that end a turn in these prompts, <|eot_id|> and <|im_end|>. Files of some
# fine-tuned models name only the end of a text, and answers would not stop.
_TURN_ENDS = {"llama_3": 128_009, "yi": 7}
_MISTRAL_ONLY = {
    "window": FieldRule("sliding_window", 0, lambda value: None, "null"),
    "kind": choice_rule("model_type", "mistral", "llava_mistral"),
}


@dataclasses.dataclass(frozen=True)
class LlavaNextConfig(LlavaConfig):
    """Configuration of LLaVA-NeXT.

    An image is encoded as an overview, which is the image resized to the tower's input size, and as
    the tiles of a larger version of the image.

    Attributes:
        sizes: (height, width) in pixels that the larger version may have; multiples of the side of
            a tile, which is the tower's input.
        prompts: prompt template, which depends on the language model: "vicuna", "mistral",
            "llama_3" or "yi".
    """

    sizes: Sizes = ()
    prompts: str = "vicuna"

    def __post_init__(self):
        super().__post_init__()
        side, limit = self.vision.image_size, min(CONTEXT, self.text.max_positions)
        with naming("image_grid_pinpoints"):
            for size in self.sizes:
                is_multiple = all(length % side == 0 for length in size)
                message = f"{list(size)} is not of whole tiles of {side} x {side} pixels"
                require(is_multiple, message)
            num_tokens = self.max_image_tokens
            message = (
                f"{num_tokens} visual tokens of an image do not fit the model's {limit} tokens"
            )
            require(num_tokens < limit, message)

    @property
    def sizes_vary(self) -> bool:
        """True, because the number of visual tokens depends on the image's aspect ratio."""
        return True

    @property
    def image_bounds(self) -> dict[str, list[list[int]]]:
        """The sizes of the larger version of an image."""
        return {"sizes": [list(size) for size in self.sizes]}

    @property
    def is_tiled(self) -> bool:
        """True; the newline tokens at the ends of rows belong to no tile."""
        return True

    @property
    def max_tiles(self) -> int:
        """Number of tiles of the largest image, including the overview."""
        return 1 + max(rows * columns for rows, columns in self.tile_grids)

    @property
    def tile_grids(self) -> Sizes:
        """Rows and columns of tiles of each size, without the overview."""
        side = self.vision.image_size
        return tuple((height // side, width // side) for height, width in self.sizes)

    @property
    def max_image_tokens(self) -> int:
        """Number of visual tokens of an image that fills the largest number of tiles."""
        return self.max_tokens_of_tiles(self.max_tiles)

    def max_tokens_of_tiles(self, num_tiles: int) -> int:
        """Returns the largest number of visual tokens of an image with at most `num_tiles` tiles.

        Args:
            num_tiles: number of tiles, including the overview.
        """
        side = self.grid[0]  # patches on each side of a tile
        # Each row of patches of the larger version ends with a newline token.
        larger_version_tokens = [
            side * rows * (side * columns + 1)
            for rows, columns in self.tile_grids
            if 1 + rows * columns <= num_tiles
        ]
        return self.vision.num_patches + max(larger_version_tokens, default=0)

    @classmethod
    def from_hf(cls, raw: Json) -> "LlavaNextConfig":
        """Builds the config from a ``config.json`` of the Hugging Face layout."""
        rules = {"text": object_rule("text_config"), "sizes": SIZES}
        text, sizes = read_fields(raw, "config.json", rules).values()
        llava_raw = raw | {"model_type": "llava", "text_config": _as_llama(text)}
        config = super().from_hf(llava_raw, sizes=sizes, prompts=_choose_prompts(text))
        return config._stop_at_turn_ends()

    @classmethod
    def check_original(cls, raw: Json) -> None:
        """Checks a ``config.json`` of the original layout before the tower's folder is read."""
        read_fields(raw, "config.json", _ORIGINAL_ONLY | {"sizes": SIZES})
        super().check_original(_as_llama(raw) | _LLAVA_FIELDS)

    @classmethod
    def from_original(cls, raw: Json, vision: Json) -> "LlavaNextConfig":
        """Builds the config from the original layout, whose sizes are (width, height)."""
        sizes = read_fields(raw, "config.json", {"sizes": SIZES})["sizes"]
        config = super().from_original(
            _as_llama(raw) | _LLAVA_FIELDS,
            vision,
            sizes=tuple(size[::-1] for size in sizes),
            prompts=_choose_prompts(raw),
        )
        return config._stop_at_turn_ends()

    def _stop_at_turn_ends(self) -> "LlavaNextConfig":
        """Returns the config with the end of a turn among the tokens that end an answer."""
        turn_end = _TURN_ENDS.get(self.prompts)
        if turn_end is None or turn_end in self.eos_token_ids:
            return self
        return dataclasses.replace(self, eos_token_ids=(*self.eos_token_ids, turn_end))

    def to_hf(self, dtype: str) -> Json:
        """Returns the ``config.json`` of the model, in the layout that `from_hf` reads.

        Args:
            dtype: name of the weights' dtype.
        """
        raw = super().to_hf(dtype)
        if self.prompts == "mistral":
            kind = {"model_type": "mistral", "architectures": ["MistralForCausalLM"]}
            raw["text_config"] |= kind | {"sliding_window": None}
        return raw | {
            "architectures": ["LlavaNextForConditionalGeneration"],
            "model_type": "llava_next",
            "image_grid_pinpoints": [list(size) for size in self.sizes],
            "image_seq_length": self.vision.num_patches,
        }


def _is_mistral(text: Json) -> bool:
    return str(text.get("model_type")).endswith("mistral")


def _choose_prompts(text: Json) -> str:
    """Returns the prompt template for a language model, by its type and its vocabulary."""
    if _is_mistral(text):
        return "mistral"
    num_rows = read_fields(text, "text_config", {"rows": LLAMA["vocab_size"]})["rows"]
    for prompts, size in _VOCABULARY_SIZES.items():
        if 0 <= num_rows - size <= _MAX_PADDING_ROWS:
            return prompts
    return "vicuna"


def _as_llama(text: Json) -> Json:
    """Returns the fields of a language model in the form of a Llama; converts a Mistral.

    Raises:
        ValueError: the model is a Mistral with an unsupported field.
    """
    if not _is_mistral(text):
        return text
    window = {"sliding_window": text.get("sliding_window", 4096)}
    fields = {name: value for name, value in (text | window).items() if value is not None}
    read_fields(fields, "text_config", _MISTRAL_ONLY)
    return _MISTRAL | fields | {"model_type": "llama"}
