"""Configurations of models, and how fields of Hugging Face JSON files are read: by rules.

A wrong folder fails before any weight is read. Defaults are those of the Hugging Face configuration
classes, because published files leave default fields out.
"""

import abc
import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, TypeGuard

from stepprune_jax.settings import is_count, is_number
from stepprune_jax.user_input import UserError, naming, require

Json = dict[str, Any]
Tokenizer = Any  # one of `transformers`, whose import takes half a second; None if there is none

# Far beyond any model. Sizes are read before the tensors they are compared with, and a list of the
# tensors of 10**9 layers would exhaust memory.
MOST, MOST_LAYERS = 1 << 24, 1024

LONGEST_SIDE = 8192  # largest input of a tower in pixels, 20 times that of any model


class FieldRule(NamedTuple):
    """What a field of a JSON file may hold.

    `read` maps the field to a value, or to None if it does not fit. Absent and null fields get the
    default; where that is None, they are refused unless `optional`.
    """

    field: str
    default: object
    read: Callable[[Any], object]
    expected: str
    optional: bool = False


def read_fields(raw: Json, where: str, rules: Mapping[str, FieldRule]) -> Json:
    """Reads values by name from the fields of a JSON object; the first misfit is refused."""
    values = {}
    for name, rule in rules.items():
        given = raw.get(rule.field)
        values[name] = rule.default if given is None else rule.read(given)
        if values[name] is None and not (given is None and rule.optional):
            found = "missing" if given is None else repr(given)
            raise UserError(f"{where}: {rule.field} is {found}, expected {rule.expected}")
    return values


def one_of(field: str, default: object, *others: object) -> FieldRule:
    """One of a few values; with the default None it must be given."""
    values = tuple(value for value in (default, *others) if value is not None)
    expected = "one of " * (len(values) > 1) + ", ".join(map(repr, values))
    return FieldRule(field, default, lambda x: x if x in values else None, expected)


def size(field: str, default: int | None, most: int = MOST) -> FieldRule:
    """A positive integer, of a size that a model can have; without a default it may be absent."""

    def read(value: object) -> int | None:
        return value if is_count(value) and value <= most else None

    return FieldRule(
        field, default, read, f"a positive integer of at most {most:,}", default is None
    )


def number(field: str, default: float | None) -> FieldRule:
    """A finite number above 0."""

    def read(value: object) -> float | None:
        return float(value) if is_number(value) and value > 0 else None

    return FieldRule(field, default, read, "a finite number above 0")


def switch(field: str, default: bool) -> FieldRule:
    """True or false."""
    return FieldRule(field, default, lambda x: x if isinstance(x, bool) else None, "true or false")


def part(field: str, default: Json | None = None) -> FieldRule:
    """An object."""
    return FieldRule(field, default, lambda x: x if isinstance(x, dict) else None, "an object")


def token(field: str, default: int | None = None) -> FieldRule:
    """A token id that may be absent."""
    return FieldRule(field, default, lambda x: x if _is_id(x) else None, "a token id", True)


def tokens(field: str, default: tuple[int, ...] = ()) -> FieldRule:
    """One or several token ids, as a tuple."""

    def read(value: object) -> tuple[int, ...] | None:
        ids = tuple(value) if isinstance(value, list | tuple) else (value,)
        known = tuple(number for number in ids if _is_id(number))
        return known if len(known) == len(ids) else None

    return FieldRule(field, default, read, "a token id, or a list of them")


def _is_id(value: object) -> TypeGuard[int]:
    return is_count(value, 0) and value < MOST


def written(config: object, rules: Mapping[str, FieldRule]) -> Json:
    """Writes the fields that `read_fields` reads by the same rules."""
    return {rule.field: getattr(config, name) for name, rule in rules.items()}


class Normalisation(NamedTuple):
    """How bytes become what a tower sees, (byte * rescale - mean) / std; by default CLIP's."""

    rescale: float = 1 / 255
    mean: tuple[float, ...] = (0.48145466, 0.4578275, 0.40821073)
    std: tuple[float, ...] = (0.26862954, 0.26130258, 0.27577711)


@dataclasses.dataclass(frozen=True)
class RopeScaling:
    """Stretching of the rotary frequencies beyond the pretrained length, by `factor`.

    "linear" divides all frequencies. "llama3" divides those whose wave is longer than the length
    over `low_freq_factor`, leaves those shorter than the length over `high_freq_factor`, and has a
    smooth transition between them.
    """

    kind: str
    factor: float
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_positions: int = 8192


_ROPE = {
    "kind": one_of("rope_type", "default", "linear", "llama3"),
    "partial": one_of("partial_rotary_factor", 1.0),
}
_FACTOR = {"factor": number("factor", None)}
_SCALINGS = {
    "linear": _FACTOR,
    "llama3": {
        **_FACTOR,
        "low_freq_factor": number("low_freq_factor", None),
        "high_freq_factor": number("high_freq_factor", None),
        "original_max_positions": size("original_max_position_embeddings", None),
    },
}


def read_rope(raw: Json, where: str) -> tuple[float, RopeScaling | None]:
    """Reads base and scaling of the rotary embedding, from either generation of field names."""
    outer = {
        "rope": part("rope_parameters" if raw.get("rope_parameters") else "rope_scaling", {}),
        "theta": number("rope_theta", 10000.0),
        "length": size("max_position_embeddings", 2048),
    }
    rope, theta, length = read_fields(raw, where, outer).values()
    where = f"{where}: {outer['rope'].field}"
    kind = rope.get("rope_type") or rope.get("type")
    rope = {"original_max_position_embeddings": length, **rope, "rope_type": kind}
    kind, _, theta = read_fields(
        rope, where, _ROPE | {"theta": number("rope_theta", theta)}
    ).values()
    if kind == "default":
        return theta, None
    scaling = RopeScaling(kind, **read_fields(rope, where, _SCALINGS[kind]))
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    require(low < high, f"{where}: low_freq_factor is {low}, expected less than {high}")
    return theta, scaling


def write_rope(scaling: RopeScaling | None) -> Json:
    """Describes a scaling in the fields that `read_rope` reads."""
    if scaling is None:
        return {"rope_type": "default"}
    return {"rope_type": scaling.kind, **written(scaling, _SCALINGS[scaling.kind])}


@dataclasses.dataclass(frozen=True)
class LlamaConfig:
    """Shape of a Llama-like language model.

    Attributes:
        vocab_size: number v of token embeddings.
        hidden_size: width e.
        intermediate_size: width f of the gated MLPs.
        num_layers: number of blocks.
        num_heads: query heads.
        num_kv_heads: key and value heads; divides `num_heads`.
        head_dim: channels c of one head.
        rope_theta: base of the rotary frequencies.
        rms_norm_eps: added to mean squares.
        max_positions: pretrained length in tokens.
        tie_embeddings: the output head is the transposed embedding.
        rope_scaling: a supported scaling, or None.
        rope_sections: for tokens with several position ids, the number of channel pairs that each
            rotates; empty for one id.
        rope_interleaved: whether the sections take channel pairs in turn, see `rotary.pair_axes`;
            otherwise one section follows the other.
        qkv_bias: whether the projections to queries, keys and values have biases.
        qk_norm: whether each head's queries and keys are normalised before they are rotated.
    """

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rope_theta: float = 10000.0
    rms_norm_eps: float = 1e-6
    max_positions: int = 2048
    tie_embeddings: bool = False
    rope_scaling: RopeScaling | None = None
    rope_sections: tuple[int, ...] = ()
    rope_interleaved: bool = False
    qkv_bias: bool = False
    qk_norm: bool = False

    def __post_init__(self):
        heads, kv_heads, c = self.num_heads, self.num_kv_heads, self.head_dim
        sections = self.rope_sections
        with naming("text_config"):
            require(
                heads % kv_heads == 0, f"{heads} heads are not a multiple of {kv_heads} key heads"
            )
            require(c > 0 and c % 2 == 0, f"head_dim {c} must be even for rotary positions")
            require(
                not sections or 2 * sum(sections) == c,
                f"mrope_section {list(sections)} does not add up to half of head_dim {c}",
            )

    @classmethod
    def from_hf(cls, raw: Json) -> "LlamaConfig":
        """Builds the config from a parsed Llama `config.json` or the `text_config` of a LLaVA.

        Args:
            raw: the parsed dict, with either generation of RoPE fields (`rope_theta` with
                `rope_scaling`, or `rope_parameters`).

        Raises:
            ValueError: a field has an unsupported value, such as a RoPE type; the message names it.
        """
        read_fields(raw, "text_config", _LLAMA_ONLY)
        return read_language(raw, LLAMA)


LLAMA = {
    "vocab_size": size("vocab_size", 32000),
    "hidden_size": size("hidden_size", 4096),
    "intermediate_size": size("intermediate_size", 11008),
    "num_layers": size("num_hidden_layers", 32, MOST_LAYERS),
    "num_heads": size("num_attention_heads", 32),
    "num_kv_heads": size("num_key_value_heads", None),
    "head_dim": size("head_dim", None),
    "rms_norm_eps": number("rms_norm_eps", 1e-6),
    "max_positions": size("max_position_embeddings", 2048),
    "tie_embeddings": switch("tie_word_embeddings", False),
}
_LLAMA_ONLY = {
    # The original LLaVA files carry their own model type around an unchanged Llama.
    "kind": one_of("model_type", "llama", "llava", "llava_llama"),
    "activation": one_of("hidden_act", "silu"),
    "attention_bias": one_of("attention_bias", False),
    "mlp_bias": one_of("mlp_bias", False),
}


def read_language(raw: Json, rules: Mapping[str, FieldRule], **more: Any) -> LlamaConfig:
    """Builds a language model's config by rules for its fields; `more` are fields of the result."""
    where = "text_config"
    fields = read_fields(raw, where, rules) | more
    heads = fields["num_heads"]
    fields["num_kv_heads"] = fields["num_kv_heads"] or heads
    fields["head_dim"] = fields.get("head_dim") or fields["hidden_size"] // heads
    theta, scaling = read_rope(raw, where)
    return LlamaConfig(**fields, rope_theta=theta, rope_scaling=scaling)


@dataclasses.dataclass(frozen=True)
class ModelConfig(abc.ABC):
    """Fields of every family's configuration, which is hashable and may have more.

    Attributes:
        vision: shape of the tower. Read outside the family: `hidden_size`, `num_layers`.
        text: shape of the language model.
        image_token_id: the vocabulary's own id for images, or None. Prompts use `IMAGE_TOKEN`.
        bos_token_id: begin-of-sequence id, or None.
        eos_token_ids: ids that end an answer.
        pad_token_id: padding id, or None.
        normalisation: how the bytes of images are normalised, by the image processor's file.
    """

    vision: Any
    text: LlamaConfig
    image_token_id: int | None = None
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()
    pad_token_id: int | None = None
    normalisation: Normalisation = Normalisation()

    @abc.abstractmethod
    def to_hf(self, dtype: str) -> Json:
        """Describes a model as a ``config.json`` that `Backbone.read` reads."""

    @property
    @abc.abstractmethod
    def feature_width(self) -> int:
        """Width d of the visual tokens that a pruner sees, before the projector."""

    @property
    def deep_layers(self) -> int:
        """Layers L of the language model after each of which a visual token adds deep features."""
        return 0

    @property
    def deep_width(self) -> int:
        """Width of a token's deep features, L x e; 0 without any."""
        return self.deep_layers * self.text.hidden_size

    @property
    def token_width(self) -> int:
        """Width w of a token with its deep features behind it, as `encode_image` returns it."""
        return self.feature_width + self.deep_width

    @property
    @abc.abstractmethod
    def max_image_tokens(self) -> int:
        """Visual tokens of the largest image: a bound for budgets, rows and memory, not a size."""

    @property
    def position_axes(self) -> int:
        """Position ids p of a token: 1, or 3 for (time, row, column)."""
        return len(self.text.rope_sections) or 1

    @property
    def sizes_vary(self) -> bool:
        """Whether images may differ in their number of visual tokens."""
        return False

    @property
    def image_bounds(self) -> dict[str, Any]:
        """What decides the sizes of resized images, besides `max_image_tokens`, for records."""
        return {}

    @property
    def is_tiled(self) -> bool:
        """Whether the tower sees an image as a whole and in tiles.

        Its tokens are then not the cells of its grid in raster order. A tap "tile" [i, n] has the
        number of each token's tile: 0 for the whole image, -1 for a token of none.
        """
        return False

    @property
    def class_token_block(self) -> int | None:
        """The tower's block whose class token ranks patches by attention; None without one."""
        return None

    @property
    def global_blocks(self) -> tuple[int, ...]:
        """The tower's blocks in which every visual token attends to its whole image."""
        return ()

    @property
    def received_block(self) -> int | None:
        """The tower's block with taps "received" and "keys" per visual token; None without one.

        "received" [i, n] is the attention that a token receives from its whole image; "keys"
        [i, n, c] measure the similarity of tokens.
        """
        return None
