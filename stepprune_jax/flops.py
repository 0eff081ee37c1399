"""Floating-point operations by formula: a multiply-add counts as two."""

from stepprune_jax.policy import PolicyConfig


def _matmuls(rows: int, *shapes: tuple[int, int]) -> int:
    return sum(2 * rows * a * b for a, b in shapes)


def policy_flops(
    config: PolicyConfig, num_tokens: int, text_length: int, kept: int
) -> dict[str, int]:
    """Operations of one image's inference: the matrix products, which are all but a percent.

    Args:
      config: Policy configuration.
      num_tokens: N.
      text_length: Text tokens the policy sees.
      kept: K; the early-exit loop takes K + 1 steps, the last of which finds the stop.

    Returns:
      `encoder`, `memory` (keys and values computed once), `steps`, and their `total`.
    """
    d, n, m = config.policy_width, num_tokens, num_tokens + 1
    hidden = config.mlp_ratio * d
    length = text_length if config.text_width else 0
    s = n + length
    encoder = _matmuls(length, (config.text_width, d))
    if d != config.feature_width:
        encoder += _matmuls(n, (config.feature_width, d))
    for block in range(config.encoder_layers):
        rows = n if block == config.encoder_layers - 1 else s
        encoder += _matmuls(s, (d, d), (d, d)) + _matmuls(rows, (d, d), (d, d), (s, d), (d, s))
        encoder += _matmuls(rows, (d, hidden), (hidden, d))
    inner = config.decoder_layers - 1
    memory = _matmuls(m, (d, d)) * (1 + 2 * inner)
    # Attention over the cache reads all T_max rows, the masked ones too.
    cache = config.steps(n)
    history = _matmuls(1, *[(d, d)] * 4, (d, cache), (cache, d))
    layer = history + _matmuls(1, (d, d), (d, d), (d, m), (m, d), (d, hidden), (hidden, d))
    step = inner * layer + history + _matmuls(1, (d, d), (d, m))
    parts = {"encoder": encoder, "memory": memory, "steps": (kept + 1) * step}
    return parts | {"total": sum(parts.values())}
