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
from stepprune_jax.pruning.ordering import tile_taps, unit_vectors

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

    def rank(self, view: PrunerInputs, steps: int) -> Ranking:
        """Orders the tokens of each row by greedy maximization of the determinant."""
        real = jnp.ones(view.tokens.shape[:2], bool) if view.valid is None else view.valid
        unit, size = unit_vectors(view.tokens, view.valid), real.sum(1, keepdims=True)
        is_split = (size > self.split_threshold) & (self.split_threshold > 0)
        in_second_half = is_split & (jnp.arange(real.shape[1]) >= size // 2)
        part = jnp.where(is_split & ~in_second_half, 1, 0)
        candidates = real
        if view.taps:
            (part,) = view.taps
            candidates = real & (part >= 0)
        words = jnp.where(view.text_valid[..., None], view.text.astype(jnp.float32), 0)
        question = unit_vectors(words.sum(1, keepdims=True), None)[:, 0]
        cosine = jnp.einsum("rne,re->rn", unit, question, precision=_EXACT)
        quality = jnp.where(
            in_second_half,
            _scale(cosine, candidates & in_second_half),
            _scale(cosine, candidates & ~in_second_half),
        )
        if self.theta is not None:
            quality = jnp.exp(quality * (self.theta / (2 - 2 * self.theta)))
        order = grow_determinant(
            unit, quality, real, part, weight=self.relevance_weight, steps=steps
        )
        return Ranking(order)


def _scale(values: Float[Array, "r n"], candidates: Bool[Array, "r n"]) -> Float[Array, "r n"]:
    """Scales values linearly so that the candidates cover [0, 1]; 1 if the candidates are equal."""
    low = jnp.min(jnp.where(candidates, values, -_LOWEST), axis=1, keepdims=True)
    high = jnp.max(jnp.where(candidates, values, _LOWEST), axis=1, keepdims=True)
    is_varied = high > low
    return jnp.where(is_varied, (values - low + _EPSILON) / jnp.where(is_varied, high - low, 1), 1)


def grow_determinant(
    unit: Float[Array, "r n e"],
    quality: Float[Array, "r n"],
    real: Bool[Array, "r n"],
    part: Int[Array, "r n"],
    *,
    weight: float,
    steps: int,
) -> Int[Array, "r t"]:
    """Chooses tokens one by one, so that each maximizes the determinant of the kernel.

    The kernel of tokens i and j is their cosine times (1 - w + w q_i q_j), or 0 for tokens of
    different parts. Each choice adds a row to the Cholesky factor of the kernel (Chen et al.,
    https://arxiv.org/abs/1709.05135), and the kernel itself is never stored.

    Args:
        unit: [r, n, e] tokens, normalised to length 1.
        quality: [r, n] q of each token.
        real: [r, n] True at real tokens.
        part: [r, n] number of each token's part. The parts take turns in ascending order; tokens of
            part -1 are chosen last.
        weight: w, the weight of relevance in the kernel.
        steps: number of tokens to choose; static.

    Returns:
        [r, t] int32 indices in order of choice; undefined after a row's last token.
    """
    (r, n), token_index = real.shape, jnp.arange(real.shape[1])

    def step(carry, t):
        gain, factor, turn = carry
        next_turn = jnp.min(turn, axis=1, keepdims=True)
        choice = jnp.argmax(jnp.where(turn == next_turn, gain, _LOWEST), axis=1)[:, None].astype(
            jnp.int32
        )

        def at_choice(x):
            return jnp.take_along_axis(x, choice, axis=1)

        chosen = jnp.take_along_axis(unit, choice[..., None], axis=1)[:, 0]
        cosine = jnp.einsum("rne,re->rn", unit, chosen, precision=_EXACT)
        kernel = cosine * (1 - weight + weight * quality * at_choice(quality))
        same_part = part == at_choice(part)
        kernel = jnp.where(same_part, kernel, 0)
        choice_column = jnp.take_along_axis(factor, choice[:, None], axis=2)[..., 0]
        residual = kernel - jnp.einsum("rt,rtn->rn", choice_column, factor, precision=_EXACT)
        # The gain of a token that depends linearly on earlier choices may round to 0 or below.
        choice_gain = at_choice(gain)
        row = jnp.where(
            choice_gain > 0, residual / jnp.sqrt(jnp.where(choice_gain > 0, choice_gain, 1)), 0
        )
        gain = jnp.where(token_index == choice, _LOWEST, gain - jnp.square(row))
        # The next turn of a part comes after the turns of all other parts. A chosen token gets the
        # largest number, so it has no further turn.
        turn = jnp.where(
            token_index == choice,
            2 * last_turn,
            turn + jnp.where(same_part & (turn < last_turn), n, 0),
        )
        return (gain, factor.at[:, t].set(row), turn), choice[:, 0]

    is_zero = jnp.all(unit == 0, axis=2)
    gain = jnp.where(is_zero, 0, 1 - weight + weight * jnp.square(quality))
    last_turn = n * n
    turn = jnp.where(real, jnp.where(part < 0, last_turn, part), 2 * last_turn)
    start = jnp.where(real, gain, _LOWEST), jnp.zeros((r, steps, n), jnp.float32), turn
    _, order = jax.lax.scan(step, start, jnp.arange(steps))
    return order.T
