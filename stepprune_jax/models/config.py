"""Configurations of models, and rules that read fields of Hugging Face JSON files.

A `FieldRule` checks one field. Rules reject an unsupported folder before any weight is read. Their
defaults are the defaults of the Hugging Face configuration classes, because published files leave
default fields out.
"""

import abc
import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, TypeGuard

from stepprune_jax.settings import is_count, is_number
from stepprune_jax.user_input import UserError, naming, require

Json = dict[str, Any]
Tokenizer = Any  # a tokenizer of `transformers`, whose import takes half a second; or None

# Limits far beyond any model. The list of the expected tensors is built before the weight files are
# read; for a config with 10**9 layers the list would exhaust memory.
MAX_SIZE, MAX_LAYERS = 1 << 24, 1024

MAX_SIDE = 8192  # pixels on each side of a tower's input: 20 times the side of any model


class FieldRule(NamedTuple):
    """The values that a field of a JSON file may hold.

    Attributes:
        field: name of the field.
        default: value of an absent or null field. If the default is None, the field is required,
            unless it is `optional`.
        read: maps the field to the value that is used, or to None if the field is invalid.
        expected: description of the valid values, for the error message.
        optional: whether the field may be absent without a default; its value is then None.
    """

    field: str
    default: object
    read: Callable[[Any], object]
    expected: str
    optional: bool = False


def read_fields(raw: Json, where: str, rules: Mapping[str, FieldRule]) -> Json:
    """Reads and checks fields of a JSON object.

    Args:
        raw: the parsed JSON object.
        where: name of the file or object, for the error message.
        rules: a rule for each name of the result.

    Returns:
        The values by the names of `rules`.

    Raises:
        ValueError: a field is invalid, or a required field is missing.
    """
    values = {}
    for name, rule in rules.items():
        field_value = raw.get(rule.field)
        values[name] = rule.default if field_value is None else rule.read(field_value)
        if values[name] is None and not (field_value is None and rule.optional):
            actual = "missing" if field_value is None else repr(field_value)
            raise UserError(f"{where}: {rule.field} is {actual}, expected {rule.expected}")
    return values


def choice_rule(field: str, default: object, *alternatives: object) -> FieldRule:
    """Returns the rule for a field with a fixed set of values; required if the default is None."""
    values = tuple(value for value in (default, *alternatives) if value is not None)
    expected = "one of " * (len(values) > 1) + ", ".join(map(repr, values))
    return FieldRule(field, default, lambda value: value if value in values else None, expected)


def size_rule(field: str, default: int | None, limit: int = MAX_SIZE) -> FieldRule:
    """Returns the rule for an integer from 1 to `limit`; optional if the default is None."""

    def read(value: object) -> int | None:
        return value if is_count(value) and value <= limit else None

    expected = f"a positive integer of at most {limit:,}"
    return FieldRule(field, default, read, expected, default is None)


def number_rule(field: str, default: float | None) -> FieldRule:
    """Returns the rule for a finite number above 0; required if the default is None."""

    def read(value: object) -> float | None:
        return float(value) if is_number(value) and value > 0 else None

    return FieldRule(field, default, read, "a finite number above 0")


def bool_rule(field: str, default: bool) -> FieldRule:
    """Returns the rule for a boolean."""

    def read(value: object) -> bool | None:
        return value if isinstance(value, bool) else None

    return FieldRule(field, default, read, "true or false")


def object_rule(field: str, default: Json | None = None) -> FieldRule:
    """Returns the rule for a JSON object; required if the default is None."""

    def read(value: object) -> Json | None:
        return value if isinstance(value, dict) else None

    return FieldRule(field, default, read, "an object")


def token_id_rule(field: str, default: int | None = None) -> FieldRule:
    """Returns the rule for an optional token id."""

    def read(value: object) -> int | None:
        return value if _is_token_id(value) else None

    return FieldRule(field, default, read, "a token id", True)


def token_ids_rule(field: str, default: tuple[int, ...] = ()) -> FieldRule:
    """Returns the rule for one token id or several, which are read as a tuple."""

    def read(value: object) -> tuple[int, ...] | None:
        entries = tuple(value) if isinstance(value, list | tuple) else (value,)
        ids = tuple(entry for entry in entries if _is_token_id(entry))
        return ids if len(ids) == len(entries) else None

    return FieldRule(field, default, read, "a token id, or a list of them")


def _is_token_id(value: object) -> TypeGuard[int]:
    return is_count(value, 0) and value < MAX_SIZE


def write_fields(config: object, rules: Mapping[str, FieldRule]) -> Json:
    """Returns attributes of a config as the JSON fields that `read_fields` reads."""
    return {rule.field: getattr(config, name) for name, rule in rules.items()}


class Normalisation(NamedTuple):
    """Normalisation of pixel bytes: (byte * rescale - mean) / std, per channel.

    The defaults are the values of CLIP.
    """

    rescale: float = 1 / 255
    mean: tuple[float, ...] = (0.48145466, 0.4578275, 0.40821073)
    std: tuple[float, ...] = (0.26862954, 0.26130258, 0.27577711)


@dataclasses.dataclass(frozen=True)
class RopeScaling:
    """Scaling of the rotary frequencies to contexts longer than the pretrained length.

    Attributes:
        kind: "linear" divides all frequencies by `factor`. "llama3" divides only slow frequencies,
            with a smooth transition to the fast ones, which are unchanged.
        factor: divisor of the frequencies.
        low_freq_factor: for "llama3". A frequency is slow if its wavelength in tokens is above
            `original_max_positions / low_freq_factor`.
        high_freq_factor: for "llama3". A frequency is fast if its wavelength in tokens is below
            `original_max_positions / high_freq_factor`.
        original_max_positions: pretrained length in tokens.
    """

    kind: str
    factor: float
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_positions: int = 8192


_ROPE = {
    "kind": choice_rule("rope_type", "default", "linear", "llama3"),
    "partial": choice_rule("partial_rotary_factor", 1.0),
}
_FACTOR = {"factor": number_rule("factor", None)}
_SCALINGS = {
    "linear": _FACTOR,
    "llama3": {
        **_FACTOR,
        "low_freq_factor": number_rule("low_freq_factor", None),
        "high_freq_factor": number_rule("high_freq_factor", None),
        "original_max_positions": size_rule("original_max_position_embeddings", None),
    },
}


def read_rope(raw: Json, where: str) -> tuple[float, RopeScaling | None]:
    """Reads the base and the scaling of the rotary embedding.

    Newer files have all fields in `rope_parameters`. Older files have a field `rope_theta` and an
    object `rope_scaling`.

    Raises:
        ValueError: a field is missing or unsupported.
    """
    outer_rules = {
        "rope": object_rule(rope_field(raw), {}),
        "theta": number_rule("rope_theta", 10000.0),
        "max_positions": size_rule("max_position_embeddings", 2048),
    }
    rope, theta, max_positions = read_fields(raw, where, outer_rules).values()
    where = f"{where}: {rope_field(raw)}"
    kind = rope.get("rope_type") or rope.get("type")
    rope = {"original_max_position_embeddings": max_positions, **rope, "rope_type": kind}
    inner_rules = _ROPE | {"theta": number_rule("rope_theta", theta)}
    kind, _, theta = read_fields(rope, where, inner_rules).values()
    if kind == "default":
        return theta, None
    scaling = RopeScaling(kind, **read_fields(rope, where, _SCALINGS[kind]))
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    require(low < high, f"{where}: low_freq_factor is {low}, expected less than {high}")
    return theta, scaling


def rope_field(raw: Json) -> str:
    """Returns the name of the field that holds the rotary embedding's parameters."""
    return "rope_parameters" if raw.get("rope_parameters") else "rope_scaling"


def write_rope(scaling: RopeScaling | None) -> Json:
    """Returns a scaling as the JSON fields that `read_rope` reads."""
    if scaling is None:
        return {"rope_type": "default"}
    return {"rope_type": scaling.kind, **write_fields(scaling, _SCALINGS[scaling.kind])}


@dataclasses.dataclass(frozen=True)
class LlamaConfig:
    """Shape of a Llama-like language model.

    Attributes:
        vocab_size: number v of token embeddings.
        hidden_size: width e.
        intermediate_size: width f of the gated MLPs.
        num_layers: number of blocks.
        num_heads: number of query heads.
        num_kv_heads: number of key and value heads; divides `num_heads`.
        head_dim: channels c of one head.
        rope_theta: base of the rotary frequencies.
        rms_norm_eps: constant that RMS norms add to the mean square.
        max_positions: pretrained length in tokens.
        tie_embeddings: whether the output head is the transposed embedding.
        rope_scaling: scaling of the rotary frequencies; None for no scaling.
        rope_sections: if a token has several position ids, the number of channel pairs that each
            id rotates; empty if a token has one id.
        rope_interleaved: whether the sections take channel pairs in turn (see
            `rotary.pair_axes`) instead of consecutive channel pairs.
        qkv_bias: whether the projections to queries, keys and values have biases.
        qk_norm: whether each head's queries and keys are normalized before the rotation.
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
            grouping = f"{heads} heads are not a multiple of {kv_heads} key heads"
            require(heads % kv_heads == 0, grouping)
            require(c > 0 and c % 2 == 0, f"head_dim {c} must be even for rotary positions")
            require(
                not sections or 2 * sum(sections) == c,
                f"mrope_section {list(sections)} does not add up to half of head_dim {c}",
            )

    @classmethod
    def from_hf(cls, raw: Json) -> "LlamaConfig":
        """Builds the config from a Llama's `config.json` or a LLaVA's `text_config`.

        Args:
            raw: the parsed JSON object. `read_rope` describes its fields for rotary positions.

        Raises:
            ValueError: a field has an unsupported value, such as a RoPE type; the message names
                the field.
        """
        read_fields(raw, "text_config", _LLAMA_ONLY)
        return read_language(raw, LLAMA)


LLAMA = {
    "vocab_size": size_rule("vocab_size", 32000),
    "hidden_size": size_rule("hidden_size", 4096),
    "intermediate_size": size_rule("intermediate_size", 11008),
    "num_layers": size_rule("num_hidden_layers", 32, MAX_LAYERS),
    "num_heads": size_rule("num_attention_heads", 32),
    "num_kv_heads": size_rule("num_key_value_heads", None),
    "head_dim": size_rule("head_dim", None),
    "rms_norm_eps": number_rule("rms_norm_eps", 1e-6),
    "max_positions": size_rule("max_position_embeddings", 2048),
    "tie_embeddings": bool_rule("tie_word_embeddings", False),
}
_LLAMA_ONLY = {
    # The original LLaVA files describe an unchanged Llama under the model type of LLaVA.
    "kind": choice_rule("model_type", "llama", "llava", "llava_llama"),
    "activation": choice_rule("hidden_act", "silu"),
    "attention_bias": choice_rule("attention_bias", False),
    "mlp_bias": choice_rule("mlp_bias", False),
}


def read_language(raw: Json, rules: Mapping[str, FieldRule], **overrides: Any) -> LlamaConfig:
    """Builds the configuration of a language model.

    Args:
        raw: the parsed JSON object with the language model's fields.
        rules: rules for attributes of `LlamaConfig`, except the rotary embedding's.
        **overrides: attributes of the result that are not read by `rules`.

    Returns:
        The checked configuration.

    Raises:
        ValueError: a field has an unsupported value; the message names the field.
    """
    where = "text_config"
    fields = read_fields(raw, where, rules) | overrides
    heads = fields["num_heads"]
    fields["num_kv_heads"] = fields["num_kv_heads"] or heads
    fields["head_dim"] = fields.get("head_dim") or fields["hidden_size"] // heads
    theta, scaling = read_rope(raw, where)
    return LlamaConfig(**fields, rope_theta=theta, rope_scaling=scaling)


@dataclasses.dataclass(frozen=True)
class ModelConfig(abc.ABC):
    """Configuration of a vision-language model: the fields that every family has.

    Configurations are hashable. A family may add fields.

    Attributes:
        vision: shape of the tower. Code outside the family reads `hidden_size` and `num_layers`.
        text: shape of the language model.
        image_token_id: id of an image in the model's vocabulary; None if the vocabulary has no such
            token. Prompts use `IMAGE_TOKEN` instead.
        bos_token_id: begin-of-sequence id, or None.
        eos_token_ids: ids that end an answer.
        pad_token_id: padding id, or None.
        normalisation: normalization of image bytes, as the image processor's file defines it.
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
        """Returns the ``config.json`` of a model whose weights have a dtype, such as "bfloat16"."""

    @property
    @abc.abstractmethod
    def feature_width(self) -> int:
        """Width d of the visual tokens that a pruner reads, before the projector."""

    @property
    def num_deepstack_layers(self) -> int:
        """Number L of language-model layers that add DeepStack features to visual tokens.

        DeepStack (https://arxiv.org/abs/2406.04334) adds features of intermediate tower blocks to
        the visual tokens after each of the first L layers. L is 0 for models without DeepStack.
        """
        return 0

    @property
    def deepstack_width(self) -> int:
        """Width L * e of a token's concatenated DeepStack features; 0 for models without them."""
        return self.num_deepstack_layers * self.text.hidden_size

    @property
    def token_width(self) -> int:
        """Width w of a token that `encode_image` returns: features, then DeepStack features."""
        return self.feature_width + self.deepstack_width

    @property
    @abc.abstractmethod
    def max_image_tokens(self) -> int:
        """Upper bound on an image's visual tokens, used for budgets, row lengths and memory."""

    @property
    def position_axes(self) -> int:
        """Number p of position ids of a token: 1, or 3 for (time, row, column)."""
        return len(self.text.rope_sections) or 1

    @property
    def sizes_vary(self) -> bool:
        """Whether images may differ in their number of visual tokens."""
        return False

    @property
    def reads_videos(self) -> bool:
        """Whether the model reads videos. Its backbone then defines `read_video`."""
        return False

    @property
    def image_bounds(self) -> dict[str, Any]:
        """Limits on the sizes of resized images, except `max_image_tokens`, for saved records."""
        return {}

    @property
    def is_tiled(self) -> bool:
        """Whether the tower encodes an overview of the image and separate tiles of it.

        The tokens of such a model are not the cells of its grid in raster order. The tap "tile"
        [i, n] gives the tile number of each token: 0 for the overview, -1 for a token that belongs
        to no tile.
        """
        return False

    @property
    def class_token_block(self) -> int | None:
        """Tower block whose class-token attention ranks patches; None without a class token."""
        return None

    @property
    def global_blocks(self) -> tuple[int, ...]:
        """Tower blocks with global attention: every visual token attends to its entire image."""
        return ()

    @property
    def received_block(self) -> int | None:
        """Tower block with the taps "received" and "keys" per visual token; None without one.

        "received" [i, n] is the attention that a token receives from its entire image; "keys"
        [i, n, c] measure the similarity of tokens.
        """
        return None
