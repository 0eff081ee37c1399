"""CDPruner: diverse tokens among those that are relevant to the question.

Zhang et al. (https://arxiv.org/abs/2506.10967). A determinantal point process prefers sets of
tokens whose kernel has a large determinant. The kernel is the cosine between projected tokens,
times the relevance of both; the set is grown greedily, by the token that increases the determinant
most.

Relevance is not the authors' own for LLaVA: minus the cosine between CLIP's projection of a patch
and the question behind CLIP's text tower. No LLaVA checkpoint has either. Here it is the cosine
between a projected token and the mean word embedding of the question; OpenVINO GenAI takes that of
the whole prompt for Qwen2.5-VL.
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
_LEAST = jnp.finfo(jnp.float32).min
# Keeps the least relevant token's kernel above 0, as in the authors' program.
_SMALL = 1e-6


@dataclasses.dataclass(frozen=True)
class CDPruner(Ranker):
    """Keeps tokens that are relevant to the question and unlike one another, chosen greedily.

    Relevance is scaled to [0, 1] in each image; without a question all tokens are equally relevant.
    Where images are seen in tiles, each is chosen from separately, one token in turn.
    Ties go to the earlier token. `split_threshold=1` with `relevance_weight=0.5` is the kernel
    that OpenVINO GenAI deploys.

    Attributes:
        theta: balance of relevance in [0, 1): relevance r becomes exp(r theta / (2 - 2 theta)).
            None for r itself, which is what the authors' program runs.
        relevance_weight: share in [0, 1] of the kernel with relevance; the rest is that without.
        split_threshold: images of more tokens are split in two halves, by raster order, which are
            scaled and chosen from separately, alternately one token each, the second half first. 0
            for never.
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
        """Returns the tiles of the tokens, where images are seen in tiles."""
        return tile_taps(config)

    def rank(self, view: PrunerInputs, steps: int) -> Ranking:
        """Orders the tokens of each row by greedy maximization of the determinant."""
        real = jnp.ones(view.tokens.shape[:2], bool) if view.valid is None else view.valid
        unit, size = unit_vectors(view.tokens, view.valid), real.sum(1, keepdims=True)
        split = (size > self.split_threshold) & (self.split_threshold > 0)
        second = split & (jnp.arange(real.shape[1]) >= size // 2)
        part = jnp.where(split & ~second, 1, 0)
        among = real
        if view.taps:
            (part,) = view.taps
            among = real & (part >= 0)
        words = jnp.where(view.text_valid[..., None], view.text.astype(jnp.float32), 0)
        question = unit_vectors(words.sum(1, keepdims=True), None)[:, 0]
        likeness = jnp.einsum("rne,re->rn", unit, question, precision=_EXACT)
        quality = jnp.where(
            second, _scaled(likeness, among & second), _scaled(likeness, among & ~second)
        )
        if self.theta is not None:
            quality = jnp.exp(quality * (self.theta / (2 - 2 * self.theta)))
        order = grow_determinant(unit, quality, self.relevance_weight, real, part, steps)
        return Ranking(order)


def _scaled(values: Float[Array, "r n"], among: Bool[Array, "r n"]) -> Float[Array, "r n"]:
    """Scales values to [0, 1] by the extremes of some; 1 where these are equal."""
    low = jnp.min(jnp.where(among, values, -_LEAST), axis=1, keepdims=True)
    high = jnp.max(jnp.where(among, values, _LEAST), axis=1, keepdims=True)
    differ = high > low
    return jnp.where(differ, (values - low + _SMALL) / jnp.where(differ, high - low, 1), 1)


def grow_determinant(
    unit: Float[Array, "r n e"],
    quality: Float[Array, "r n"],
    weight: float,
    real: Bool[Array, "r n"],
    part: Int[Array, "r n"],
    steps: int,
) -> Int[Array, "r t"]:
    """Selects tokens one by one, each the one that increases the kernel's determinant most.

    The kernel of tokens i and j is their cosine times (1 - w + w q_i q_j), or 0 between parts. Its
    Cholesky factor grows by a row with each token (Chen et al., https://arxiv.org/abs/1709.05135),
    and the kernel itself is never stored.

    Args:
        unit: tokens of length 1.
        quality: q of each token.
        weight: w.
        real: True = token.
        part: number of each token's part. The parts take turns, in their order; those of part -1
            follow when no others are left.
        steps: static number of tokens to select.

    Returns:
        [r, t] int32 indices in order of choice, undefined where no token is left.
    """
    (r, n), place = real.shape, jnp.arange(real.shape[1])

    def step(carry, t):
        gain, factor, turn = carry
        first = jnp.min(turn, axis=1, keepdims=True)
        pick = jnp.argmax(jnp.where(turn == first, gain, _LEAST), axis=1)[:, None].astype(jnp.int32)

        def of_pick(x):
            return jnp.take_along_axis(x, pick, axis=1)

        chosen = jnp.take_along_axis(unit, pick[..., None], axis=1)[:, 0]
        likeness = jnp.einsum("rne,re->rn", unit, chosen, precision=_EXACT)
        kernel = likeness * (1 - weight + weight * quality * of_pick(quality))
        same = part == of_pick(part)
        kernel = jnp.where(same, kernel, 0)
        own = jnp.take_along_axis(factor, pick[:, None], axis=2)[..., 0]
        rest = kernel - jnp.einsum("rt,rtn->rn", own, factor, precision=_EXACT)
        # Rounding leaves nothing, or less, of a token that depends on those before it.
        best = of_pick(gain)
        row = jnp.where(best > 0, rest / jnp.sqrt(jnp.where(best > 0, best, 1)), 0)
        gain = jnp.where(place == pick, _LEAST, gain - jnp.square(row))
        # A part's next turn is after those of all others; a chosen token has none.
        turn = jnp.where(place == pick, 2 * last, turn + jnp.where(same & (turn < last), n, 0))
        return (gain, factor.at[:, t].set(row), turn), pick[:, 0]

    is_zero = jnp.all(unit == 0, axis=2)
    gain = jnp.where(is_zero, 0, 1 - weight + weight * jnp.square(quality))
    last = n * n
    turn = jnp.where(real, jnp.where(part < 0, last, part), 2 * last)
    start = jnp.where(real, gain, _LEAST), jnp.zeros((r, steps, n), jnp.float32), turn
    _, order = jax.lax.scan(step, start, jnp.arange(steps))
    return order.T
