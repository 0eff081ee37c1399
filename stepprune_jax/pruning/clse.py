"""CLSE: visual tokens remain if the first layer changes their detail, and if they are attended to.

Chen et al. (https://arxiv.org/abs/2606.24165). Behind the first layer, a token's score is the
product of two numbers: the attention that the prompt's last token pays it in that layer, averaged
over heads, and its *spectral evolution*, how far the layer changed what is left of the token behind
a high-pass filter over the image's grid. Before two later layers tokens are ranked by the attention
of the layer before. Dropped tokens leave the caches of all layers.
"""

import dataclasses
from fractions import Fraction

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from stepprune_jax.models.attention import Tap
from stepprune_jax.models.config import ModelConfig
from stepprune_jax.models.sequence import Sequence
from stepprune_jax.pruning.base import LayerCut, LayerPruner, Schedule, Survivors
from stepprune_jax.pruning.ordering import require_grid
from stepprune_jax.pruning.schedule import are_layers, choose_layers, stage_widths

LAYERS = (1, 11, 21)
# Tokens behind each cut as multiples of the mean, and the authors' rounding of them for 576 tokens,
# by the share of the tokens that the mean is.
_MULTIPLES = (1.72, 1.09, 0.32)
_COUNTS = {
    Fraction(1, 3): (330, 210, 62),
    Fraction(2, 9): (220, 140, 41),
    Fraction(1, 9): (110, 70, 20),
}
_EXACT = jax.lax.Precision.HIGHEST


@dataclasses.dataclass(frozen=True)
class Clse(LayerPruner):
    """Drops visual tokens before three layers of the language model.

    Attributes:
        layer_list: the layers; None for the authors' 1, 11 and 21, or, in a model with fewer
            layers, those at the same share of its depth.
        average: whether the budget is the mean over layers, where layers before the first of the
            list count as those behind the last, as the authors count; or the number of tokens that
            remain at last.
        cutoff: width of the filter, as a share of half of the grid's shorter side.
        temperature: of the sigmoid that maps a token's evolution, in standard deviations from the
            mean of its image, to its factor.
    """

    layer_list: tuple[int, ...] | None = None
    average: bool = True
    cutoff: float = 0.1
    temperature: float = 0.1

    name = "clse"
    label = "CLSE"

    def check(self, config: ModelConfig, num_tokens: int) -> None:
        """Rejects layers that do not exist, unreachable means and numbers out of range."""
        require_grid(config, self.name)
        depth, layers = config.text.num_layers, self._layers(config)
        known = are_layers(layers, 1, depth - 1) and len(layers) <= len(LAYERS)
        self.expect("layer_list", known, f"up to three ascending layers from 1 to {depth - 1}")
        super().check(config, num_tokens)
        for option in ("cutoff", "temperature"):
            self.expect(option, getattr(self, option) > 0, "more than 0")
        reached = self._shares(config, num_tokens)[0] <= num_tokens
        what = "mean over layers" if self.average else "number"
        self.expect(
            "budget", reached, f"a smaller {what}: more than all tokens would remain at first"
        )

    def program(self) -> "Clse":
        """Removes the schedule, as `drop` is given the counts."""
        return Clse(cutoff=self.cutoff, temperature=self.temperature)

    def cuts(self, config: ModelConfig, num_tokens: int) -> tuple[LayerCut, ...]:
        """Returns a cut before each layer of the list; the first also reads embeddings."""
        cuts = []
        for layer in self._layers(config):
            taps = (Tap("attention", layer - 1), *([] if cuts else [Tap("hidden", 0)]))
            cuts.append(LayerCut(layer, taps, forgets=True))
        return tuple(cuts)

    def schedule(self, config: ModelConfig, num_tokens: int) -> Schedule:
        """Counts the tokens from each layer of the list on."""
        # A whole number may come out a little smaller.
        counts = [max(1, int(share + 1e-9)) for share in self._shares(config, num_tokens)]
        left = [Survivors(min(count, num_tokens)) for count in counts]
        return Schedule(num_tokens, num_tokens, tuple(left))

    def scores(self, sequence: Sequence, taps: dict[str, Array]) -> Float[Array, "b s"]:
        """Scores by attention, and at the first cut also by spectral evolution."""
        before = taps.get("hidden.0")
        attention = next(tap for name, tap in taps.items() if name != "hidden.0")
        score = attention[:, :, 0].mean(1)
        if before is None:
            return score
        smooth = low_pass(sequence, self.cutoff)
        old, new = (
            jnp.abs(x - _sums(smooth, x)).mean(2)
            for x in (before.astype(jnp.float32), sequence.hidden.astype(jnp.float32))
        )
        return score * evolution(old, new, _same_image(sequence), self.temperature)

    def _layers(self, config: ModelConfig) -> tuple[int, ...]:
        """Returns the layers before which tokens are dropped."""
        if self.layer_list is not None:
            return self.layer_list
        return choose_layers(LAYERS, config.text.num_layers)

    def _shares(self, config: ModelConfig, num_tokens: int) -> list[float]:
        """Returns the tokens behind each cut, not rounded."""
        budget, layers = self.budget.exact_count(num_tokens), self._layers(config)
        depth, multiples = config.text.num_layers, _MULTIPLES[-len(layers) :]
        if not self.average:
            return [budget * multiple / multiples[-1] for multiple in multiples]
        own = _COUNTS.get(Fraction(budget, num_tokens))
        if own is not None and (layers, depth) == (LAYERS, 32):
            return [count * num_tokens / 576 for count in own]
        first, *widths = stage_widths(layers, depth)
        widths[-1] += first
        mean = sum(m * w for m, w in zip(multiples, widths, strict=True)) / depth
        return [budget * multiple / mean for multiple in multiples]


def _sums(weights: Float[Array, "b s s"], x: Float[Array, "b s *e"]) -> Float[Array, "b s *e"]:
    """Adds up the slots of each row with the weights of each slot."""
    return jnp.einsum("bst,bt...->bs...", weights, x, precision=_EXACT)


def _same_image(sequence: Sequence) -> Float[Array, "b s s"]:
    """Returns 1 for pairs of visual tokens of one image, 0 for others."""
    image = sequence.image
    return ((image[..., None] == image[:, None]) & (image >= 0)[:, None]).astype(jnp.float32)


def low_pass(sequence: Sequence, cutoff: float) -> Float[Array, "b s s"]:
    """Returns the weights of a Gaussian low-pass filter over the grid of each image.

    The filter is periodic, and multiplies the frequency (k, l) by exp(-(k^2 + l^2) / (2 sigma^2)),
    sigma being `cutoff` times half of the shorter side, rounded down. It is the product of one
    filter of rows and one of columns: over a side of length m, tokens at a distance d have the
    weight sum_k exp(-k^2 / (2 sigma^2)) cos(2 pi k d / m) / m.

    Returns:
        [b, s, s] weights of each visual token's sum over its image; 0 between others.
    """
    s = sequence.image.shape[1]
    assert sequence.grid is not None  # there are images
    image, grid = jnp.maximum(sequence.image, 0), jnp.maximum(sequence.grid, 1)
    half = jnp.min(grid // 2, axis=2).astype(jnp.float32)
    sigma = jnp.maximum(cutoff * half, jnp.finfo(jnp.float32).tiny ** 0.5)
    patch = jnp.maximum(sequence.index, 0)
    columns = jnp.take_along_axis(grid[..., 1], image, axis=1)
    places = (patch // columns, patch % columns)
    k = jnp.arange(s // 2 + 1)
    weights = _same_image(sequence)
    for axis, place in enumerate(places):
        side = grid[..., axis, None]  # [b, j, 1]
        # Frequencies from -(m // 2) on: k and -k are alike, and -m / 2 stands alone.
        times = jnp.where((k == 0) | (2 * k == side), 1, 2) * (2 * k <= side)
        gain = times * jnp.exp(-jnp.square(k / sigma[..., None]) / 2) / side
        # Reduced by the period in integers, so that the cosine has a small argument.
        turn = (jnp.arange(s)[:, None] * k) % side[..., None]
        wave = jnp.cos(2 * jnp.pi * turn / side[..., None])
        filter_ = jnp.einsum("bjdk,bjk->bjd", wave, gain, precision=_EXACT)
        apart = jnp.abs(place[:, :, None] - place[:, None])
        of_slot = jnp.take_along_axis(filter_, image[..., None], axis=1)
        weights *= jnp.take_along_axis(of_slot, jnp.minimum(apart, s - 1), axis=2)
    return weights


def evolution(
    before: Float[Array, "b s"],
    after: Float[Array, "b s"],
    same: Float[Array, "b s s"],
    temperature: float,
) -> Float[Array, "b s"]:
    """Maps the change of each token's detail, relative to what it was, to a factor in (0, 1).

    The change |after - before| / (mean(before) + before), at most 1, is standardised over the image
    (by the standard deviation of a sample) and goes through a sigmoid.
    """
    tiny, number = 1e-6, jnp.maximum(same.sum(2), 1)  # as the authors have it
    change = jnp.abs(after - before) / (_sums(same, before) / number + before + tiny)
    change = jnp.minimum(change, 1)
    centred = change - _sums(same, change) / number
    variance = _sums(same, jnp.square(centred)) / jnp.maximum(number - 1, 1)
    return jax.nn.sigmoid(centred / (jnp.sqrt(variance) + tiny) / temperature)
