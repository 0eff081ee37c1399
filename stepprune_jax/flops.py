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
from stepprune_jax.policy.buckets import bucket_ladder, choose_bucket
from stepprune_jax.policy.pointer_cache import table_bytes, tabulates_pairs
from stepprune_jax.policy.selection import BLOCK, MOST_TABLE_BYTES
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
    config: PolicyConfig,
    num_tokens: int,
    text_length: int,
    kept: int,
    *,
    exact: bool = True,
    group: int | None = None,
) -> dict[str, int]:
    """Counts the FLOPs of the policy's inference of one image that keeps `kept` tokens.

    Without an `exact` budget the policy stops by itself: the stop takes one more token and, with
    `stop="hazard"`, another decoder layer. `group` tokens share a pointer distribution; None stands
    for the configuration's number.

    Returns:
        Counts of the `encoder`; of `memory`, the keys and values of slots for all their readers; of
        `tables` over slots; of the pointer's `steps`; of the `hazard`; and their `total`.
    """
    n, m, d = num_tokens, num_tokens + 1, config.policy_width
    token_count, inner, group = kept + (not exact), config.decoder_layers - 1, group or config.group
    history_rows = config.steps(n)
    if exact:  # the loop has the steps of the count's bucket
        history_rows = choose_bucket(min(kept, history_rows), bucket_ladder(history_rows))
    has_tables = table_bytes(config, m) <= MOST_TABLE_BYTES
    if has_tables:
        tables, step = _table_loop_flops(config, n, history_rows, group)
        step_count = -(-token_count // group)
        history_rows = _round_to_blocks(history_rows, group)
    else:
        tables, step, step_count = 0, _step_flops(config, n, history_rows), token_count
    runs_hazard = config.stop == "hazard" and not (exact and has_tables)
    parts = {
        "encoder": _encoder_flops(config, n, text_length if config.text_width else 0),
        "memory": _matmuls(m, (d, d)) + (inner + runs_hazard) * _matmuls(m, (d, d), (d, d)),
        "tables": tables,
        "steps": step_count * step,
        "hazard": runs_hazard * token_count * (_layer_flops(config, n, history_rows) + 2 * d),
    }
    return parts | {"total": sum(parts.values())}


def _encoder_flops(config: PolicyConfig, n: int, length: int) -> int:
    """Counts the encoder's FLOPs for n image tokens and `length` words."""
    d, s = config.policy_width, n + length
    hidden, total = config.mlp_ratio * d, _matmuls(length, (config.text_width, d))
    if length and config.first_query == "question":
        total += _matmuls(length, (d, 1), (1, d)) + _matmuls(1, (d, d))
    if d != config.feature_width:
        total += _matmuls(n, (config.feature_width, d))
    for block in range(config.encoder_layers):
        rows = n if block == config.encoder_layers - 1 else s
        total += _matmuls(s, (d, d), (d, d)) + _matmuls(rows, (d, d), (d, d), (s, d), (d, s))
        total += _matmuls(rows, (d, hidden), (hidden, d))
    return total


def _history_flops(config: PolicyConfig, rows: int) -> int:
    """Counts a query's attention over a history, whose rows are all read, masked or not."""
    d = config.policy_width
    return _matmuls(1, *[(d, d)] * 4, (d, rows), (rows, d))


def _layer_flops(config: PolicyConfig, n: int, rows: int) -> int:
    """Counts a decoder layer for a query: its history of `rows`, its cross-attention, its MLP."""
    d, m, hidden = config.policy_width, n + 1, config.mlp_ratio * config.policy_width
    finish = _matmuls(1, (d, d), (d, d), (d, m), (m, d), (d, hidden), (hidden, d))
    return _history_flops(config, rows) + finish


def _round_to_blocks(steps: int, group: int) -> int:
    """Rounds the steps of a loop over tables up to a multiple of the loop's block of groups."""
    block = -(-min(BLOCK, steps) // group) * group
    return -(-steps // block) * block


def _table_loop_flops(config: PolicyConfig, n: int, steps: int, group: int) -> tuple[int, int]:
    """Counts the FLOPs of `tables.tabulate`, and of a pointer step that reads the tables."""
    d, m, inner = config.policy_width, n + 1, config.decoder_layers - 1
    # With one decoder layer a step needs only the last query of the group before it.
    queries, products = (group, 1) if inner else (1, 2)
    # Queries, keys and values of the history; folded keys of the pointer, and their offsets.
    tables = _matmuls(m, *[(d, d)] * 4, (d, 1)) + (not inner) * _matmuls(m, (d, d))
    layer = _layer_flops(config, n, _round_to_blocks(steps, group) + group - 1)
    step = queries * (_matmuls(1, (m, d), (d, d)) + inner * layer) + _matmuls(m, (d, 1))
    # Scores of the history, and with one decoder layer residuals times folded keys.
    if tabulates_pairs(m, steps):
        return tables + products * _matmuls(m, (d, m)), step
    return tables, step + queries * products * _matmuls(m, (d, 1))


def _step_flops(config: PolicyConfig, n: int, rows: int) -> int:
    """Counts the FLOPs of `decoder.pointer_step` without the hazard."""
    d, inner = config.policy_width, config.decoder_layers - 1
    pointer = _history_flops(config, rows) + _matmuls(1, (d, d), (d, n + 1))
    return inner * _layer_flops(config, n, rows) + pointer


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


def query_key_flops(config: LlamaConfig, tokens: int) -> int:
    """Counts the FLOPs of a layer's queries and keys for one row of tokens."""
    heads = config.num_heads + config.num_kv_heads
    return _matmuls(tokens, (config.hidden_size, heads * config.head_dim))


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
