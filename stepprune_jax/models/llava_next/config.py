"""Configuration of LLaVA-NeXT: that of LLaVA with the sizes that images are resized to."""

import dataclasses
from typing import Any

from stepprune_jax.models.config import LLAMA, FieldRule, Json, one_of, part, read_fields
from stepprune_jax.models.llava.config import LlavaConfig
from stepprune_jax.settings import is_count
from stepprune_jax.user_input import naming, require

# The longest row of training, which the largest image has to fit.
CONTEXT = 4096

Sizes = tuple[tuple[int, int], ...]


def _sizes(value: Any) -> Sizes | None:
    try:
        pairs = tuple((height, width) for height, width in value)
    except (TypeError, ValueError):
        return None
    return pairs if pairs and all(is_count(side) for pair in pairs for side in pair) else None


SIZES = FieldRule(
    "image_grid_pinpoints",
    ((336, 672), (672, 336), (672, 672), (1008, 336), (336, 1008)),
    _sizes,
    "a list of at least one pair of sides in pixels",
)
_ORIGINAL_ONLY = {
    "aspect": one_of("image_aspect_ratio", "anyres"),
    "merge": one_of("mm_patch_merge_type", None, "spatial_unpad"),
}
# What LLaVA-1.5 has in their place.
_FLAT = {"image_aspect_ratio": "square", "mm_patch_merge_type": "flat"}
# Mistral's text model is Llama's with other defaults, and a window that the 7B does not use.
_MISTRAL = {"intermediate_size": 14336, "num_key_value_heads": 8, "max_position_embeddings": 131072}
# Tokens of the vocabularies whose special tokens prompts use. Files may have up to 64 more rows.
_VOCABULARIES = {"llama_3": 128_256, "yi": 64_000}
_MORE_ROWS = 64
_MISTRAL_ONLY = {
    "window": FieldRule("sliding_window", 0, lambda x: None, "null"),
    "kind": one_of("model_type", "mistral", "llava_mistral"),
}


@dataclasses.dataclass(frozen=True)
class LlavaNextConfig(LlavaConfig):
    """LLaVA's configuration, with the sizes that images are resized to.

    Attributes:
        sizes: (height, width) of each; multiples of the tower's side.
        prompts: template of the prompts, by the language model: "vicuna", "mistral", "llama_3" or
            "yi".
    """

    sizes: Sizes = ()
    prompts: str = "vicuna"

    def __post_init__(self):
        super().__post_init__()
        side, limit = self.vision.image_size, min(CONTEXT, self.text.max_positions)
        with naming("image_grid_pinpoints"):
            for size in self.sizes:
                whole = all(length % side == 0 for length in size)
                require(whole, f"{list(size)} is not of whole tiles of {side} x {side} pixels")
            most = self.max_image_tokens
            fitting = f"{most} visual tokens of an image do not fit the model's {limit} tokens"
            require(most < limit, fitting)

    @property
    def sizes_vary(self) -> bool:
        """True, as the number of visual tokens depends on the image's aspect ratio."""
        return True

    @property
    def image_bounds(self) -> dict[str, list[list[int]]]:
        """The sizes."""
        return {"sizes": [list(size) for size in self.sizes]}

    @property
    def is_tiled(self) -> bool:
        """True; the ends of rows are tokens of no tile."""
        return True

    @property
    def max_tiles(self) -> int:
        """Tiles of the largest image, with the whole image as one more."""
        return 1 + max(rows * columns for rows, columns in self.plans)

    @property
    def plans(self) -> Sizes:
        """Rows and columns of tiles of each size."""
        side = self.vision.image_size
        return tuple((height // side, width // side) for height, width in self.sizes)

    @property
    def max_image_tokens(self) -> int:
        """Visual tokens of an image that fills the largest number of tiles."""
        return self.tokens_of(self.max_tiles)

    def tokens_of(self, tiles: int) -> int:
        """Returns the most visual tokens of an image with at most so many tiles."""
        base, side = self.vision.num_patches, self.grid[0]
        fitting = [(r, c) for r, c in self.plans if 1 + r * c <= tiles]
        return base + max((side * r * (side * c + 1) for r, c in fitting), default=0)

    @classmethod
    def from_hf(cls, raw: Json) -> "LlavaNextConfig":
        """Builds the config from a ``config.json`` of the Hugging Face layout."""
        known = {"text": part("text_config"), "sizes": SIZES}
        text, sizes = read_fields(raw, "config.json", known).values()
        given = raw | {"model_type": "llava", "text_config": _as_llama(text)}
        return super().from_hf(given, sizes=sizes, prompts=_prompts(text))

    @classmethod
    def check_original(cls, raw: Json) -> None:
        """Checks a ``config.json`` of the original layout, before its tower is looked for."""
        read_fields(raw, "config.json", _ORIGINAL_ONLY | {"sizes": SIZES})
        super().check_original(_as_llama(raw) | _FLAT)

    @classmethod
    def from_original(cls, raw: Json, vision: Json) -> "LlavaNextConfig":
        """Builds the config from the original layout, which has sizes as (width, height)."""
        sizes = read_fields(raw, "config.json", {"sizes": SIZES})["sizes"]
        more = {"sizes": tuple(size[::-1] for size in sizes), "prompts": _prompts(raw)}
        return super().from_original(_as_llama(raw) | _FLAT, vision, **more)

    def to_hf(self, dtype: str) -> Json:
        """Describes a model with an image token as a ``config.json`` that `from_hf` reads."""
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


def _prompts(text: Json) -> str:
    """Returns the template of a language model's prompts, by its type and its vocabulary."""
    if _is_mistral(text):
        return "mistral"
    rows = read_fields(text, "text_config", {"rows": LLAMA["vocab_size"]})["rows"]
    fitting = [x for x, size in _VOCABULARIES.items() if 0 <= rows - size <= _MORE_ROWS]
    return fitting[0] if fitting else "vicuna"


def _as_llama(text: Json) -> Json:
    """Returns the fields of a text model as those of a Llama, if it is a Mistral."""
    if not _is_mistral(text):
        return text
    window = {"sliding_window": text.get("sliding_window", 4096)}
    given = {name: value for name, value in (text | window).items() if value is not None}
    read_fields(given, "text_config", _MISTRAL_ONLY)
    return _MISTRAL | given | {"model_type": "llama"}
