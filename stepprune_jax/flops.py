"""Counts of floating-point operations (FLOPs), by formula and from traced programs.

Only matrix products are counted; they make up about 99 % of the operations. A multiply-accumulate
(MAC) is two FLOPs. Some papers report MACs and others report FLOPs, so `LlmCost` has both.

The policy encodes the n visual tokens of an image, and then selects tokens with a pointer decoder.
A slot is a candidate of the pointer: a visual token, or the learned stop that ends the selection.
There are n + 1 slots. The history of a pointer step consists of the slots selected before. The
hazard is a separate decoder layer that computes the probability to stop. A group consists of the
tokens that are selected from one pointer distribution.
"""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

from jax.extend.core import ClosedJaxpr, Jaxpr

from stepprune_jax.models.backbone import Backbone
from stepprune_jax.models.config import LlamaConfig
from stepprune_jax.policy import PolicyConfig
from stepprune_jax.policy.buckets import bucket_ladder, choose_bucket
from stepprune_jax.policy.pointer_cache import table_bytes, tabulates_pairs
from stepprune_jax.policy.selection import BLOCK, MAX_TABLE_BYTES
from stepprune_jax.user_input import expect


class LlmCost(NamedTuple):
    """MACs of one row's forward pass through the language model.

    Attributes:
        projections: MACs of the projections to queries, keys, values and attention outputs.
        attention: MACs of attention over all pairs of tokens. The causal mask discards half of the
            pairs; papers usually count all of them.
        mlp: MACs of the MLPs.
        head: MACs of the output head for the requested logits.
    """

    projections: int
    attention: int
    mlp: int
    head: int

    @property
    def layer_macs(self) -> int:
        """MACs of the layers without the head: the number that pruning papers report."""
        return self.projections + self.attention + self.mlp

    @property
    def flops(self) -> int:
        """FLOPs with the head and with masked pairs: the work of dense matrix products."""
        return 2 * (self.layer_macs + self.head)

    @property
    def causal_flops(self) -> int:
        """FLOPs with the head and without masked pairs: the necessary work."""
        return self.flops - self.attention


def _matmul_flops(rows: int, *shapes: tuple[int, int]) -> int:
    """Counts the FLOPs of multiplying a matrix of `rows` rows by each of several matrices.

    Args:
        rows: number of rows of the left factor.
        *shapes: (rows, columns) of each right factor.
    """
    return sum(2 * rows * in_size * out_size for in_size, out_size in shapes)


def policy_flops(
    config: PolicyConfig,
    num_tokens: int,
    text_length: int,
    kept: int,
    *,
    exact: bool = True,
    group: int | None = None,
) -> dict[str, int]:
    """Counts the FLOPs of the policy's inference for one image.

    Args:
        config: configuration of the policy.
        num_tokens: number n of visual tokens.
        text_length: number of text tokens that the policy reads.
        kept: number of tokens that the policy keeps.
        exact: whether `kept` is a fixed budget. If False, the learned stop ends the selection, so
            the stop slot is selected in one more pointer step.
        group: number of tokens that are selected from one pointer distribution; None selects the
            number in the configuration.

    Returns:
        FLOPs by part: "encoder"; "memory", the keys and values of slots; "tables", the products of
        pairs of slots that are computed before the first step; "steps", all pointer steps;
        "hazard"; and "total", their sum.
    """
    n, num_slots, d = num_tokens, num_tokens + 1, config.policy_width
    num_selected, group = kept + (not exact), group or config.group
    inner_layers = config.decoder_layers - 1  # decoder layers before the pointer's own layer
    history_rows = config.steps(n)  # rows allocated for the history; unused rows are masked
    if exact:  # the budget is rounded up to a bucket, so that budgets share compiled programs
        history_rows = choose_bucket(min(kept, history_rows), bucket_ladder(history_rows))
    has_pairs = tabulates_pairs(num_slots, history_rows)
    has_tables = not has_pairs or table_bytes(config, num_slots) <= MAX_TABLE_BYTES
    if has_tables:
        table_flops, step_flops = _table_loop_flops(config, n, history_rows, group)
        num_steps = math.ceil(num_selected / group)
        history_rows = _round_to_blocks(history_rows, group)
    else:
        table_flops, step_flops = 0, _step_flops(config, n, history_rows)
        num_steps = num_selected
    runs_hazard = config.stop == "hazard" and not (exact and has_tables)
    hazard_flops = _layer_flops(config, n, history_rows) + 2 * d
    memory_layers = inner_layers + runs_hazard
    parts = {
        "encoder": _encoder_flops(config, n, text_length if config.text_width else 0),
        "memory": _matmul_flops(num_slots, (d, d))
        + memory_layers * _matmul_flops(num_slots, (d, d), (d, d)),
        "tables": table_flops,
        "steps": num_steps * step_flops,
        "hazard": runs_hazard * num_selected * hazard_flops,
    }
    return parts | {"total": sum(parts.values())}


def _encoder_flops(config: PolicyConfig, n: int, text_length: int) -> int:
    """Counts the FLOPs of the encoder, a transformer over visual and text tokens.

    Args:
        config: configuration of the policy.
        n: number of visual tokens.
        text_length: number of text tokens that the encoder reads.
    """
    d, s = config.policy_width, n + text_length
    hidden = config.mlp_ratio * d
    total = _matmul_flops(text_length, (config.text_width, d))
    if text_length and config.first_query == "question":
        total += _matmul_flops(text_length, (d, 1), (1, d)) + _matmul_flops(1, (d, d))
    if d != config.feature_width:
        total += _matmul_flops(n, (config.feature_width, d))
    for block in range(config.encoder_layers):
        # The decoder reads visual tokens only, so the last block has no queries of text tokens.
        num_queries = n if block == config.encoder_layers - 1 else s
        total += _matmul_flops(s, (d, d), (d, d))  # keys and values
        # Queries and outputs, attention logits, and weighted values.
        total += _matmul_flops(num_queries, (d, d), (d, d), (d, s), (s, d))
        total += _matmul_flops(num_queries, (d, hidden), (hidden, d))  # MLP
    return total


def _history_flops(config: PolicyConfig, rows: int) -> int:
    """Counts the FLOPs of one query's attention over a history of `rows` rows, some masked."""
    d = config.policy_width
    return _matmul_flops(1, *[(d, d)] * 4, (d, rows), (rows, d))


def _layer_flops(config: PolicyConfig, n: int, rows: int) -> int:
    """Counts the FLOPs of a decoder layer for one query.

    The layer attends to the history and to the slots, and runs an MLP.

    Args:
        config: configuration of the policy.
        n: number of visual tokens.
        rows: number of rows of the history, some masked.
    """
    d, num_slots, hidden = config.policy_width, n + 1, config.mlp_ratio * config.policy_width
    cross_attention_flops = _matmul_flops(1, (d, d), (d, d), (d, num_slots), (num_slots, d))
    mlp_flops = _matmul_flops(1, (d, hidden), (hidden, d))
    return _history_flops(config, rows) + cross_attention_flops + mlp_flops


def _round_to_blocks(steps: int, group: int) -> int:
    """Rounds a number of steps up to complete blocks.

    The selection with tables runs in blocks of about `BLOCK` steps. A block contains complete
    groups.
    """
    block = math.ceil(min(BLOCK, steps) / group) * group
    return math.ceil(steps / block) * block


def _table_loop_flops(config: PolicyConfig, n: int, steps: int, group: int) -> tuple[int, int]:
    """Counts the FLOPs of a selection with precomputed tables, see `policy.pointer_cache`.

    Args:
        config: configuration of the policy.
        n: number of visual tokens.
        steps: number of rows of the history.
        group: number of tokens that are selected from one pointer distribution.

    Returns:
        FLOPs of the tables, which are computed once, and of one pointer step that reads them.
    """
    d, num_slots, inner_layers = config.policy_width, n + 1, config.decoder_layers - 1
    # A policy with one decoder layer only needs the last query of the previous group in a step. It
    # has two products of pairs of slots: attention logits of the history, and residuals times
    # pointer keys. Policies with more layers have only the first.
    num_queries, num_products = (group, 1) if inner_layers else (1, 2)
    # Queries, keys and values of the history; keys of the pointer, into which its query projection
    # is folded, and their offsets.
    table_flops = _matmul_flops(num_slots, *[(d, d)] * 4, (d, 1))
    if not inner_layers:
        table_flops += _matmul_flops(num_slots, (d, d))
    layer_flops = _layer_flops(config, n, _round_to_blocks(steps, group) + group - 1)
    query_flops = _matmul_flops(1, (num_slots, d), (d, d)) + inner_layers * layer_flops
    step_flops = num_queries * query_flops + _matmul_flops(num_slots, (d, 1))
    if tabulates_pairs(num_slots, steps):
        table_flops += num_products * _matmul_flops(num_slots, (d, num_slots))
    else:  # a step computes the rows of the products that it needs
        step_flops += num_queries * num_products * _matmul_flops(num_slots, (d, 1))
    return table_flops, step_flops


def _step_flops(config: PolicyConfig, n: int, rows: int) -> int:
    """Counts the FLOPs of one step of `decoder.pointer_step`, without tables and hazard.

    Args:
        config: configuration of the policy.
        n: number of visual tokens.
        rows: number of rows of the history, some masked.
    """
    d, inner_layers = config.policy_width, config.decoder_layers - 1
    pointer_flops = _history_flops(config, rows) + _matmul_flops(1, (d, d), (d, n + 1))
    return inner_layers * _layer_flops(config, n, rows) + pointer_flops


def llm_flops(
    config: LlamaConfig, prompt_tokens: int | Sequence[int], num_logits: int = 1
) -> LlmCost:
    """Counts the MACs of one prompt's prefill.

    A layer with n tokens takes 4 n e^2 + 2 n^2 e + 3 n e f MACs, with width e and MLP width f, as
    in FastV (https://arxiv.org/abs/2403.06764) and SparseVLM (https://arxiv.org/abs/2410.04417).
    With h query heads and h_kv key heads, 2 n e^2 (1 + h_kv / h) replaces 4 n e^2.

    Args:
        config: shape of the language model.
        prompt_tokens: number of tokens of the prompt, or the number of tokens in each layer if a
            method prunes inside the model.
        num_logits: number of tokens that the output head computes logits for.

    Returns:
        MACs by kind of operation.

    Raises:
        ValueError: `prompt_tokens` has a negative number or the wrong length.
    """
    if isinstance(prompt_tokens, int):
        layer_tokens = [prompt_tokens] * config.num_layers
    else:
        layer_tokens = list(prompt_tokens)
    is_valid = len(layer_tokens) == config.num_layers and min(layer_tokens) >= 0
    expected = f"a count or one for each of {config.num_layers} layers"
    expect("prompt_tokens", prompt_tokens, is_valid, expected)
    query_width = config.num_heads * config.head_dim
    key_width = config.num_kv_heads * config.head_dim
    num_tokens = sum(layer_tokens)  # over all layers
    num_pairs = sum(n * n for n in layer_tokens)
    return LlmCost(
        projections=num_tokens * config.hidden_size * 2 * (query_width + key_width),
        attention=2 * num_pairs * query_width,
        mlp=num_tokens * 3 * config.hidden_size * config.intermediate_size,
        head=num_logits * config.hidden_size * config.vocab_size,
    )


def query_key_flops(config: LlamaConfig, tokens: int) -> int:
    """Counts the FLOPs of projecting a number of tokens to a layer's queries and keys."""
    num_heads = config.num_heads + config.num_kv_heads
    return _matmul_flops(tokens, (config.hidden_size, num_heads * config.head_dim))


def vision_flops(backbone: Backbone, grids: Sequence[tuple[int, int]]) -> dict[str, int]:
    """Counts the FLOPs of encoding images.

    Args:
        backbone: the model.
        grids: for each image, the number of rows and columns of its visual tokens.

    Returns:
        FLOPs of the vision "tower" and of the "projector", and their "total".
    """
    image_flops = [backbone.vision_flops(grid) for grid in grids]
    parts = {name: sum(flops[name] for flops in image_flops) for name in ("tower", "projector")}
    return parts | {"total": sum(parts.values())}


def traced_flops(jaxpr: Jaxpr | ClosedJaxpr) -> int:
    """Counts the FLOPs of the matrix products in a traced program, over all devices.

    Recomputation in a backward pass counts again. The body of a scan counts once per iteration,
    unlike in the compiler's own cost analysis. A loop of unknown length counts one iteration, and a
    conditional counts its most expensive branch.

    Args:
        jaxpr: the program, such as `jax.make_jaxpr(function)(*arguments)`.
    """
    if isinstance(jaxpr, ClosedJaxpr):
        jaxpr = jaxpr.jaxpr
    total = 0
    for equation in jaxpr.eqns:
        # Programs inside the equation, such as the body of a loop or the branches of a conditional.
        inner_flops = [
            traced_flops(item)
            for value in equation.params.values()
            for item in (value if isinstance(value, tuple | list) else (value,))
            if isinstance(item, Jaxpr | ClosedJaxpr)
        ]
        match equation.primitive.name:
            case "dot_general":
                (contracted_axes, _), _ = equation.params["dimension_numbers"]
                left: Any = equation.invars[0].aval
                output: Any = equation.outvars[0].aval
                num_products = math.prod(left.shape[axis] for axis in contracted_axes)
                total += 2 * output.size * num_products
            case "scan":
                total += equation.params["length"] * sum(inner_flops)
            case "cond":
                total += max(inner_flops)
            case _:
                total += sum(inner_flops)
    return total
