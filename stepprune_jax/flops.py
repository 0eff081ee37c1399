"""Operation counts, by formula and of traced programs: matrix products, all but a percent.

A multiply-accumulate (MAC) counts as two floating-point operations (FLOPs). Papers differ in
whether they double, and in which tokens they count; `LlmCost` has both figures.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

from jax.extend.core import ClosedJaxpr, Jaxpr

from stepprune_jax.models.backbone import Backbone
from stepprune_jax.models.config import LlamaConfig
from stepprune_jax.policy import PolicyConfig
from stepprune_jax.user_input import expect


class LlmCost(NamedTuple):
    """Multiply-accumulates of one row's pass through the language model.

    `attention` counts every pair of tokens, of which the causal mask discards half, as usually
    counted. `head` is that of the requested logits.
    """

    projections: int
    attention: int
    mlp: int
    head: int

    @property
    def layer_macs(self) -> int:
        """MACs of the layers, without the head: the figure that pruning papers report."""
        return self.projections + self.attention + self.mlp

    @property
    def flops(self) -> int:
        """FLOPs with the head and masked pairs: the work of plain matrix products."""
        return 2 * (self.layer_macs + self.head)

    @property
    def causal_flops(self) -> int:
        """FLOPs with the head, without masked pairs: the necessary work."""
        return self.flops - self.attention


def _matmuls(rows: int, *shapes: tuple[int, int]) -> int:
    return sum(2 * rows * a * b for a, b in shapes)


def policy_flops(
    config: PolicyConfig, num_tokens: int, text_length: int, kept: int, *, exact: bool = True
) -> dict[str, int]:
    """Counts the FLOPs of the policy's inference of one image that keeps `kept` tokens.

    Without an `exact` budget the policy stops by itself, which takes one more step and, with
    `stop="hazard"`, a decoder layer of its own. Returns those of the `encoder`; `memory`, the
    slots' keys and values for all their readers; `tables` over pairs of slots; `steps`; `hazard`;
    and their `total`.
    """
    d, n, m = config.policy_width, num_tokens, num_tokens + 1
    hidden = config.mlp_ratio * d
    length = text_length if config.text_width else 0
    s = n + length
    encoder = _matmuls(length, (config.text_width, d))
    if length and config.first_query == "question":
        encoder += _matmuls(length, (d, 1), (1, d)) + _matmuls(1, (d, d))
    if d != config.feature_width:
        encoder += _matmuls(n, (config.feature_width, d))
    for block in range(config.encoder_layers):
        rows = n if block == config.encoder_layers - 1 else s
        encoder += _matmuls(s, (d, d), (d, d)) + _matmuls(rows, (d, d), (d, d), (s, d), (d, s))
        encoder += _matmuls(rows, (d, hidden), (hidden, d))
    # Attention over a history reads all T_max rows, including masked ones.
    cache = config.steps(n)
    history = _matmuls(1, *[(d, d)] * 4, (d, cache), (cache, d))
    finish = _matmuls(1, (d, d), (d, d), (d, m), (m, d), (d, hidden), (hidden, d))
    values = _matmuls(m, (d, d), (d, d))
    # Queries, keys and values of the history, their scores; keys of the pointer, folded.
    tables = _matmuls(m, (d, d), (d, d), (d, d), (d, m)) + _matmuls(m, (d, d), (d, 1))
    step = _matmuls(1, (m, d), (d, d), (d, m))
    inner = config.decoder_layers - 1
    if inner:
        step += inner * (finish + history)
    else:
        tables += _matmuls(m, (d, m), (d, d))
    stops = config.stop == "hazard" and not exact
    steps = kept + (not exact)
    parts = {
        "encoder": encoder,
        "memory": _matmuls(m, (d, d)) + (inner + stops) * values,
        "tables": tables,
        "steps": steps * step,
        "hazard": stops * steps * (history + finish + 2 * d),
    }
    return parts | {"total": sum(parts.values())}


def llm_flops(
    config: LlamaConfig, prompt_tokens: int | Sequence[int], num_logits: int = 1
) -> LlmCost:
    """Counts the operations of one row's prefill.

    A layer that n tokens enter takes 4 n e^2 + 2 n^2 e + 3 n e f multiply-accumulates (with width
    e and MLP width f; with grouped key heads 2 n e^2 (1 + h_kv / h) in place of 4 n e^2), as in
    FastV (https://arxiv.org/abs/2403.06764) and SparseVLM (https://arxiv.org/abs/2410.04417).

    Tokens are a count, or one for each layer where a method prunes inside the model.
    """
    same = isinstance(prompt_tokens, int)
    tokens = [prompt_tokens] * config.num_layers if same else list(prompt_tokens)
    fits = len(tokens) == config.num_layers and min(tokens) >= 0
    expected = f"a count or one for each of {config.num_layers} layers"
    expect("prompt_tokens", prompt_tokens, fits, expected)
    inner = config.num_heads * config.head_dim
    grouped = config.num_kv_heads * config.head_dim
    pairs = sum(n * n for n in tokens) * inner
    return LlmCost(
        projections=sum(tokens) * config.hidden_size * 2 * (inner + grouped),
        attention=2 * pairs,
        mlp=sum(tokens) * 3 * config.hidden_size * config.intermediate_size,
        head=num_logits * config.hidden_size * config.vocab_size,
    )


def vision_flops(backbone: Backbone, grids: Sequence[tuple[int, int]]) -> dict[str, int]:
    """Counts the FLOPs of `tower` and `projector` for images of these grids, and their `total`."""
    counts = [backbone.vision_flops(grid) for grid in grids]
    parts = {name: sum(count[name] for count in counts) for name in ("tower", "projector")}
    return parts | {"total": sum(parts.values())}


def traced_flops(jaxpr: Jaxpr | ClosedJaxpr) -> int:
    """Counts the FLOPs of a traced program's matrix products, on all devices together.

    Recomputation in a backward pass counts again. A scan's body counts as often as it runs, where
    the compiler's own analysis counts it once; a loop of unknown length counts once, and a
    conditional counts its most expensive branch.
    """
    if isinstance(jaxpr, ClosedJaxpr):
        jaxpr = jaxpr.jaxpr
    total = 0
    for equation in jaxpr.eqns:
        inner = [
            traced_flops(found)
            for value in equation.params.values()
            for found in (value if isinstance(value, tuple | list) else (value,))
            if isinstance(found, Jaxpr | ClosedJaxpr)
        ]
        match equation.primitive.name:
            case "dot_general":
                (contracted, _), _ = equation.params["dimension_numbers"]
                sides = equation.invars[0].aval.shape
                size = equation.outvars[0].aval.size
                total += 2 * size * math.prod(sides[axis] for axis in contracted)
            case "scan":
                total += equation.params["length"] * sum(inner)
            case "cond":
                total += max(inner)
            case _:
                total += sum(inner)
    return total
