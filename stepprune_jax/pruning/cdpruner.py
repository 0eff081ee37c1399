"""CDPruner: keeps tokens that are relevant to the question and different from one another.

Zhang et al. (https://arxiv.org/abs/2506.10967). A determinantal point process prefers sets of
tokens whose kernel has a large determinant. The kernel of two tokens is the cosine between the
projected tokens, times the relevance of both. Tokens are added greedily: each maximizes the
determinant.

The authors' relevance for LLaVA is minus the cosine between CLIP's projection of a patch and CLIP's
embedding of the question, but LLaVA checkpoints contain neither. Here the relevance is the cosine
between a projected token and the mean word embedding of the question. OpenVINO GenAI uses the mean
over the prompt for Qwen2.5-VL.
"""

import dataclasses
from typing import ClassVar

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from stepprune_jax.models.attention import Tap
from stepprune_jax.models.config import ModelConfig
from stepprune_jax.pruning.base import PrunerInputs, Ranker, Ranking
from stepprune_jax.pruning.ordering import advance_turns, start_turns, tile_taps, unit_vectors

_EXACT = jax.lax.Precision.HIGHEST
_LOWEST = jnp.finfo(jnp.float32).min
# Keeps the kernel of the least relevant token above 0, as in the authors' program.
_EPSILON = 1e-6


@dataclasses.dataclass(frozen=True)
class CDPruner(Ranker):
    """Keeps tokens that are relevant to the question and different from one another.

    Relevance is scaled to [0, 1] in each image; without a question all tokens are equally relevant.
    If a model splits images into tiles, tokens are chosen from the tiles in turn. Ties go to the
    earlier token. `split_threshold=1` with `relevance_weight=0.5` is the kernel of OpenVINO GenAI.

    Attributes:
        theta: weight of relevance in [0, 1): relevance r becomes exp(r theta / (2 - 2 theta)). None
            uses r itself, like the authors' program.
        relevance_weight: weight in [0, 1] of the kernel with relevance, against the kernel without.
        split_threshold: images with more tokens are split into two halves in raster order. The
            halves are scaled separately, and tokens are chosen from them in turn, starting with the
            second half. 0 disables splitting.
    """

    theta: float | None = None
    relevance_weight: float = 1.0
    split_threshold: int = 0

    name = "cdpruner"
    label = "CDPruner"
    after_projector: ClassVar[bool] = True
    reads_text: ClassVar[bool] = True
    positions: ClassVar[str] = "compact"

    def check(self, config: ModelConfig, num_tokens: int) -> None:
        """Also rejects options out of range."""
        super().check(config, num_tokens)
        self.expect("theta", self.theta is None or 0 <= self.theta < 1, "None, or 0 to below 1")
        self.expect("relevance_weight", 0 <= self.relevance_weight <= 1, "0 to 1")
        self.expect("split_threshold", self.split_threshold >= 0, "an integer from 0")

    def taps(self, config: ModelConfig) -> tuple[Tap, ...]:
        """Returns the tap of the tokens' tiles, if images are split into tiles."""
        return tile_taps(config)

    def rank(self, inputs: PrunerInputs, steps: int) -> Ranking:
        """Orders the tokens of each row by greedy maximization of the determinant.

        Args:
            inputs: inputs of the pruner. If images are split into tiles, the only tap is the tile
                of each token.
            steps: static length of the order.

        Returns:
            The order of the tokens.
        """
        is_token = inputs.valid
        # Tokens are chosen from the parts of an image in turn. The second half is part 0, because
        # it takes the first turn.
        num_tokens = is_token.sum(1, keepdims=True)
        is_split = (num_tokens > self.split_threshold) & (self.split_threshold > 0)
        in_second_half = is_split & (jnp.arange(is_token.shape[1]) >= num_tokens // 2)
        part = jnp.where(is_split & ~in_second_half, 1, 0)
        is_scaled = is_token
        if inputs.taps:
            (part,) = inputs.taps
            is_scaled = is_token & (part >= 0)  # not tokens at the ends of rows, without a tile
        unit_tokens = unit_vectors(inputs.tokens, inputs.valid)
        words = jnp.where(inputs.text_valid[..., None], inputs.text.astype(jnp.float32), 0)
        question = unit_vectors(words.sum(1, keepdims=True), None)[:, 0]
        cosine = jnp.einsum("rne,re->rn", unit_tokens, question, precision=_EXACT)
        relevance = jnp.where(
            in_second_half,
            _scale(cosine, is_scaled & in_second_half),
            _scale(cosine, is_scaled & ~in_second_half),
        )
        if self.theta is not None:
            relevance = jnp.exp(relevance * (self.theta / (2 - 2 * self.theta)))
        order = grow_determinant(
            unit_tokens, relevance, is_token, part, weight=self.relevance_weight, steps=steps
        )
        return Ranking(order)


def _scale(values: Float[Array, "r n"], mask: Bool[Array, "r n"]) -> Float[Array, "r n"]:
    """Scales each row linearly, such that its values under the mask cover [0, 1].

    If all values under the mask are equal, all values become 1. Values outside the mask may leave
    [0, 1].
    """
    low = jnp.min(jnp.where(mask, values, -_LOWEST), axis=1, keepdims=True)
    high = jnp.max(jnp.where(mask, values, _LOWEST), axis=1, keepdims=True)
    is_varied = high > low
    return jnp.where(is_varied, (values - low + _EPSILON) / jnp.where(is_varied, high - low, 1), 1)


def grow_determinant(
    unit_tokens: Float[Array, "r n e"],
    relevance: Float[Array, "r n"],
    is_token: Bool[Array, "r n"],
    part: Int[Array, "r n"],
    *,
    weight: float,
    steps: int,
) -> Int[Array, "r t"]:
    """Chooses tokens one by one, such that each maximizes the determinant of a kernel.

    The kernel of tokens i and j is their cosine times (1 - w + w q_i q_j), or 0 for tokens of
    different parts, where q is the relevance and w its weight. Each choice adds a row to the
    Cholesky factor of the kernel (Chen et al., https://arxiv.org/abs/1709.05135). The kernel itself
    is never stored.

    Args:
        unit_tokens: [r, n, e] n tokens of each row, normalized to length 1.
        relevance: [r, n] relevance q of each token.
        is_token: [r, n] False at padding.
        part: [r, n] part of the image to which each token belongs, from 0. The parts take turns in
            ascending order. Tokens of part -1 are chosen last.
        weight: weight w of relevance in the kernel.
        steps: number t of tokens to choose; static.

    Returns:
        [r, t] int32 indices in order of choice; undefined after a row's last token.
    """
    (r, n), token_index = is_token.shape, jnp.arange(is_token.shape[1])

    def step(carry, step_index):
        # gain: [r, n] factor by which a token would increase the determinant.
        # cholesky: [r, t, n] rows of the factor, one per choice.
        # turn: [r, n] number of the turn in which a token may be chosen.
        gain, cholesky, turn = carry
        next_turn = jnp.min(turn, axis=1, keepdims=True)
        next_gain = jnp.where(turn == next_turn, gain, _LOWEST)
        choice = jnp.argmax(next_gain, axis=1)[:, None].astype(jnp.int32)

        def at_choice(values):
            return jnp.take_along_axis(values, choice, axis=1)

        chosen = jnp.take_along_axis(unit_tokens, choice[..., None], axis=1)[:, 0]
        cosine = jnp.einsum("rne,re->rn", unit_tokens, chosen, precision=_EXACT)
        kernel_row = cosine * (1 - weight + weight * relevance * at_choice(relevance))
        same_part = part == at_choice(part)
        kernel_row = jnp.where(same_part, kernel_row, 0)
        choice_column = jnp.take_along_axis(cholesky, choice[:, None], axis=2)[..., 0]
        residual = kernel_row - jnp.einsum("rt,rtn->rn", choice_column, cholesky, precision=_EXACT)
        # The gain of a token that depends linearly on earlier choices may round to 0 or below.
        choice_gain = at_choice(gain)
        has_gain = choice_gain > 0
        cholesky_row = jnp.where(
            has_gain, residual / jnp.sqrt(jnp.where(has_gain, choice_gain, 1)), 0
        )
        gain = jnp.where(token_index == choice, _LOWEST, gain - jnp.square(cholesky_row))
        turn = advance_turns(turn, part, choice)
        return (gain, cholesky.at[:, step_index].set(cholesky_row), turn), choice[:, 0]

    is_zero = jnp.all(unit_tokens == 0, axis=2)
    gain = jnp.where(is_zero, 0, 1 - weight + weight * jnp.square(relevance))
    no_rows = jnp.zeros((r, steps, n), jnp.float32)
    start = jnp.where(is_token, gain, _LOWEST), no_rows, start_turns(is_token, part)
    _, order = jax.lax.scan(step, start, jnp.arange(steps))
    return order.T
