"""The decoder's configuration, and checked readers of Hugging Face `config.json` fields.

Every reader raises a `ValueError` that names the field, the value found and what is supported, so
that a wrong folder fails before any weight is read. Defaults are those of the Hugging Face
configuration classes, because published files leave default fields out.
"""

import dataclasses
from typing import Any

from stepprune_jax.settings import is_count, is_number

# Far beyond any model. Sizes are read before the tensors they are compared with, and a list of the
# tensors of 10**9 layers would exhaust memory.
MOST, MOST_LAYERS = 1 << 24, 1024

LONGEST_SIDE = 8192  # largest input of a tower in pixels, 20 times that of any model

ROPE_TYPES = ("default", "linear", "llama3")


def checked(config: dict[str, Any], field: str, default: Any, supported: tuple, where: str) -> Any:
    """Reads a field that must have one of a few values; the error lists them."""
    value = config.get(field, default)
    if value not in supported:
        listed = ", ".join(map(repr, supported))
        raise ValueError(f"{where}: {field} is {value!r}; supported: {listed}")
    return value


def positive(config: dict[str, Any], field: str, default: int, where: str, most: int = MOST) -> int:
    """Reads a field that must be a positive integer, of a size that a model can have."""
    value = config.get(field)
    value = default if value is None else value
    if not is_count(value) or value > most:
        limit = f" of at most {most:,}" if is_count(value) else ""
        raise ValueError(f"{where}: {field} is {value!r}, expected a positive integer{limit}")
    return value


def real(config: dict[str, Any], field: str, default: float, where: str) -> float:
    """Reads a field that must be a finite number above 0."""
    value = config.get(field)
    value = default if value is None else value
    if not (is_number(value) and value > 0):
        raise ValueError(f"{where}: {field} is {value!r}, expected a finite number above 0")
    return float(value)


def switch(config: dict[str, Any], field: str, default: bool, where: str) -> bool:
    """Reads a field that must be true or false."""
    value = config.get(field)
    value = default if value is None else value
    if not isinstance(value, bool):
        raise ValueError(f"{where}: {field} is {value!r}, expected true or false")
    return value


def square(config: dict[str, Any], field: str, default: int, where: str) -> int:
    """Reads a side length, given as one integer or as a pair of equal integers."""
    value = config.get(field, default)
    if isinstance(value, list | tuple):
        if not value or any(side != value[0] for side in value):
            raise ValueError(f"{where}: {field} is {value!r}, expected a square")
        value = value[0]
    return positive({field: value}, field, default, where, LONGEST_SIDE)


def token_id(value: Any, field: str, where: str) -> int | None:
    """Reads a token id that may be absent."""
    if not (value is None or _is_id(value)):
        raise ValueError(f"{where}: {field} is {value!r}, expected a token id")
    return value


def token_ids(value: Any, field: str, where: str) -> tuple[int, ...]:
    """Reads one or several token ids, which may be absent, as a tuple."""
    if value is None:
        return ()
    ids = value if isinstance(value, list | tuple) else [value]
    if not all(map(_is_id, ids)):
        raise ValueError(f"{where}: {field} is {value!r}, expected a token id, or a list of them")
    return tuple(ids)


def _is_id(value: Any) -> bool:
    """Whether a vocabulary can have this id."""
    return is_count(value, 0) and value < MOST


@dataclasses.dataclass(frozen=True)
class RopeScaling:
    """Stretching of the rotary frequencies beyond the pretrained length.

    Attributes:
        kind: "linear" (all frequencies divided by `factor`) or "llama3" (only those whose wave is
            long compared with the pretrained length, with a smooth transition).
        factor: factor by which the context is extended.
        low_freq_factor: "llama3": waves longer than length / low_freq_factor are stretched fully.
        high_freq_factor: "llama3": waves shorter than length / high_freq_factor are left alone.
        original_max_positions: "llama3": the pretrained length.
    """

    kind: str
    factor: float
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_positions: int = 8192


def read_rope(config: dict[str, Any], where: str) -> tuple[float, RopeScaling | None]:
    """Reads base and scaling of the rotary embedding, from either generation of field names.

    Raises:
        ValueError: an unsupported kind of scaling, or a field that is missing or malformed.
    """
    field = "rope_parameters" if config.get("rope_parameters") else "rope_scaling"
    rope = config.get(field) or {}
    if not isinstance(rope, dict):
        raise ValueError(f"{where}: {field} is {rope!r}, expected an object with rope_type")
    theta = real(rope, "rope_theta", real(config, "rope_theta", 10000.0, where), where)
    where = f"{where}: {field}"
    kind = rope.get("rope_type", rope.get("type", "default")) or "default"
    if kind not in ROPE_TYPES:
        raise ValueError(
            f"{where}: RoPE scaling type {kind!r} is not supported; "
            f"supported are {', '.join(map(repr, ROPE_TYPES))}"
        )
    if rope.get("partial_rotary_factor", 1.0) != 1.0:
        raise ValueError(f"{where}: partial_rotary_factor other than 1 is not supported")
    if kind == "default":
        return theta, None
    needed = ("factor",) if kind == "linear" else ("factor", "low_freq_factor", "high_freq_factor")
    missing = [name for name in needed if name not in rope]
    if missing:
        raise ValueError(f"{where}: RoPE scaling {kind!r} lacks {', '.join(missing)}")
    factor = real(rope, "factor", 1.0, where)
    if kind == "linear":
        return theta, RopeScaling(kind, factor)
    low, high = (real(rope, f"{name}_freq_factor", 1.0, where) for name in ("low", "high"))
    if low >= high:
        raise ValueError(
            f"{where}: low_freq_factor is {low}, expected less than high_freq_factor ({high})"
        )
    length = positive(config, "max_position_embeddings", 2048, where)
    length = positive(rope, "original_max_position_embeddings", length, where)
    return theta, RopeScaling(kind, factor, low, high, length)


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
        qkv_bias: whether the projections to queries, keys and values have biases.
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
    qkv_bias: bool = False

    def __post_init__(self):
        if self.num_heads % self.num_kv_heads:
            raise ValueError(
                f"text: num_heads {self.num_heads} is not a multiple of "
                f"num_kv_heads {self.num_kv_heads}"
            )
        if self.head_dim % 2:
            raise ValueError(f"text: head_dim {self.head_dim} must be even for rotary positions")
        if self.rope_sections and 2 * sum(self.rope_sections) != self.head_dim:
            raise ValueError(
                f"text: mrope_section {list(self.rope_sections)} does not add up to half of "
                f"head_dim {self.head_dim}"
            )

    @classmethod
    def from_hf(cls, config: dict[str, Any]) -> "LlamaConfig":
        """Builds the config from a parsed Llama `config.json` or the `text_config` of a LLaVA.

        Args:
            config: the parsed dict, with either generation of RoPE fields (`rope_theta` with
                `rope_scaling`, or `rope_parameters`).

        Returns:
            The frozen config.

        Raises:
            ValueError: a field has an unsupported value, such as a RoPE type; the message names it.
        """
        where = "text_config"
        # The original LLaVA files carry their own model type around an unchanged Llama.
        checked(config, "model_type", "llama", ("llama", "llava", "llava_llama"), where)
        checked(config, "hidden_act", "silu", ("silu",), where)
        checked(config, "attention_bias", False, (False,), where)
        checked(config, "mlp_bias", False, (False,), where)
        hidden_size = positive(config, "hidden_size", 4096, where)
        num_heads = positive(config, "num_attention_heads", 32, where)
        theta, scaling = read_rope(config, where)
        return cls(
            vocab_size=positive(config, "vocab_size", 32000, where),
            hidden_size=hidden_size,
            intermediate_size=positive(config, "intermediate_size", 11008, where),
            num_layers=positive(config, "num_hidden_layers", 32, where, MOST_LAYERS),
            num_heads=num_heads,
            num_kv_heads=positive(config, "num_key_value_heads", num_heads, where),
            head_dim=positive(config, "head_dim", hidden_size // num_heads, where),
            rope_theta=theta,
            rms_norm_eps=real(config, "rms_norm_eps", 1e-6, where),
            max_positions=positive(config, "max_position_embeddings", 2048, where),
            tie_embeddings=switch(config, "tie_word_embeddings", False, where),
            rope_scaling=scaling,
        )
