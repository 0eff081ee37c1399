"""CLSE: keeps visual tokens with large attention and a large change of detail in the first layer.

Chen et al. (https://arxiv.org/abs/2606.24165). After the first layer, the score of a token is the
product of two factors. The first is the attention of the prompt's last token to it, averaged over
heads. The second is its *spectral evolution*: how much the layer changes the token after a
high-pass filter over the image's grid. Before two later layers, tokens are ranked by the attention
of the preceding layer. Dropped tokens are removed from the caches of all layers.
"""

import dataclasses
from fractions import Fraction
from typing import ClassVar

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
# Number of tokens after each of the three cuts, as a multiple of the mean over layers.
_MULTIPLES = (1.72, 1.09, 0.32)
# The authors' numbers of tokens after each cut for images of 576 tokens, by the mean over layers as
# a fraction of 576.
_COUNTS = {
    Fraction(1, 3): (330, 210, 62),
    Fraction(2, 9): (220, 140, 41),
    Fraction(1, 9): (110, 70, 20),
}
_EXACT = jax.lax.Precision.HIGHEST
_EPSILON = 1e-6  # keeps divisions finite, as in the authors' program


@dataclasses.dataclass(frozen=True)
class Clse(LayerPruner):
    """Drops visual tokens before three layers of the language model.

    Attributes:
        layer_list: the layers; None for the authors' 1, 11 and 21, or the same relative depths in a
            model with fewer layers.
        average: whether the budget is the mean number of tokens over layers, or the number of
            remaining tokens. As in the authors' mean, layers before the first cut count like layers
            after the last cut.
        cutoff: width of the filter, as a fraction of half of the grid's shorter side.
        temperature: temperature of the sigmoid that maps a token's evolution to its factor. The
            evolution is measured in standard deviations from the mean of the image.
    """

    layer_list: tuple[int, ...] | None = None
    average: bool = True
    cutoff: float = 0.1
    temperature: float = 0.1

    name = "clse"
    label = "CLSE"
    reads_videos: ClassVar[bool] = False

    def check(self, config: ModelConfig, num_tokens: int) -> None:
        """Rejects layers that do not exist, unreachable means and numbers out of range."""
        require_grid(config, self.name)
        depth, layers = config.text.num_layers, self._layers(config)
        is_valid = are_layers(layers, 1, depth - 1) and len(layers) <= len(LAYERS)
        self.expect("layer_list", is_valid, f"up to three ascending layers from 1 to {depth - 1}")
        super().check(config, num_tokens)
        for option in ("cutoff", "temperature"):
            self.expect(option, getattr(self, option) > 0, "more than 0")
        is_reachable = self._unrounded_counts(config, num_tokens)[0] <= num_tokens
        quantity = "mean over layers" if self.average else "number"
        self.expect(
            "budget",
            is_reachable,
            f"a smaller {quantity}: more than all tokens would remain at first",
        )

    def program(self) -> "Clse":
        """Returns a copy without the schedule; `drop` receives the counts as an argument."""
        return Clse(cutoff=self.cutoff, temperature=self.temperature)

    def cuts(self, config: ModelConfig, num_tokens: int) -> tuple[LayerCut, ...]:
        """Returns a cut before each layer of the list; the first also reads embeddings."""
        cuts = []
        for layer in self._layers(config):
            taps = (Tap("attention", layer - 1), *([] if cuts else [Tap("hidden", 0)]))
            cuts.append(LayerCut(layer, taps, prunes_cache=True))
        return tuple(cuts)

    def schedule(self, config: ModelConfig, num_tokens: int) -> Schedule:
        """Counts the tokens from each layer of the list on."""
        # Floats may be slightly below the integer that they represent, so 1e-9 is added before
        # rounding down.
        counts = [max(1, int(x + 1e-9)) for x in self._unrounded_counts(config, num_tokens)]
        survivors = tuple(Survivors(min(count, num_tokens)) for count in counts)
        return Schedule(num_tokens, num_tokens, survivors)

    def scores(self, sequence: Sequence, taps: dict[str, Array]) -> Float[Array, "b s"]:
        """Scores tokens by attention, and at the first cut also by spectral evolution.

        Args:
            sequence: the padded sequences before the cut; a slot is a position in them.
            taps: "attention" of the preceding layer, and at the first cut the embeddings
                "hidden.0".

        Returns:
            [b, s] score of each slot.
        """
        embeddings = taps.get("hidden.0")
        attention = next(tap for name, tap in taps.items() if name != "hidden.0")
        score = attention[:, :, 0].mean(1)
        if embeddings is None:
            return score
        smoothing = low_pass(sequence, self.cutoff)
        detail_before, detail_after = (
            jnp.abs(x - _weighted_sums(smoothing, x)).mean(2)
            for x in (embeddings.astype(jnp.float32), sequence.hidden.astype(jnp.float32))
        )
        return score * evolution(
            detail_before, detail_after, _same_image(sequence), self.temperature
        )

    def _layers(self, config: ModelConfig) -> tuple[int, ...]:
        """Returns the layers before which tokens are dropped."""
        if self.layer_list is not None:
            return self.layer_list
        return choose_layers(LAYERS, config.text.num_layers)

    def _unrounded_counts(self, config: ModelConfig, num_tokens: int) -> list[float]:
        """Returns the number of an image's tokens after each cut, before rounding.

        The counts are proportional to `_MULTIPLES`, and scaled to meet the budget.

        Args:
            config: the model's configuration.
            num_tokens: number of tokens of the image.

        Returns:
            The counts, one for each layer of the list.
        """
        budget, layers = self.budget.exact_count(num_tokens), self._layers(config)
        depth, multiples = config.text.num_layers, _MULTIPLES[-len(layers) :]
        if not self.average:
            return [budget * multiple / multiples[-1] for multiple in multiples]
        published_counts = _COUNTS.get(Fraction(budget, num_tokens))
        if published_counts is not None and (layers, depth) == (LAYERS, 32):
            return [count * num_tokens / 576 for count in published_counts]
        # In the authors' mean, layers before the first cut count like layers after the last cut.
        width_before_cuts, *widths = stage_widths(layers, depth)
        widths[-1] += width_before_cuts
        mean_multiple = sum(m * w for m, w in zip(multiples, widths, strict=True)) / depth
        return [budget * multiple / mean_multiple for multiple in multiples]


def _weighted_sums(
    weights: Float[Array, "b s s"], values: Float[Array, "b s *e"]
) -> Float[Array, "b s *e"]:
    """Returns the sum over t of weights[s, t] * values[t], for each slot s of each sequence."""
    return jnp.einsum("bst,bt...->bs...", weights, values, precision=_EXACT)


def _same_image(sequence: Sequence) -> Float[Array, "b s s"]:
    """Returns 1 for pairs of visual tokens of the same image, and 0 for all other pairs."""
    image = sequence.image
    return ((image[..., None] == image[:, None]) & (image >= 0)[:, None]).astype(jnp.float32)


def low_pass(sequence: Sequence, cutoff: float) -> Float[Array, "b s s"]:
    """Returns the weights of a Gaussian low-pass filter over the grid of each image.

    The periodic filter multiplies the frequency (k, l) by exp(-(k^2 + l^2) / (2 sigma^2)), with
    sigma = `cutoff` * floor(shorter side / 2). It is the product of a filter over rows and a filter
    over columns. For a side of length m, two tokens at distance d have the weight
    sum_k exp(-k^2 / (2 sigma^2)) cos(2 pi k d / m) / m.

    Args:
        sequence: b padded sequences of s slots, with the image, index and grid of visual tokens.
        cutoff: width of the filter, as a fraction of half of the grid's shorter side.

    Returns:
        [b, s, s] weights between the visual tokens of an image; 0 for all other pairs.
    """
    s = sequence.image.shape[1]
    assert sequence.grid is not None  # there are images
    image, grid = jnp.maximum(sequence.image, 0), jnp.maximum(sequence.grid, 1)
    half_side = jnp.min(grid // 2, axis=2).astype(jnp.float32)
    # A filter of width 0 would divide by 0. The square of the lower bound is a normal float32.
    sigma = jnp.maximum(cutoff * half_side, jnp.finfo(jnp.float32).tiny ** 0.5)
    patch = jnp.maximum(sequence.index, 0)
    columns = jnp.take_along_axis(grid[..., 1], image, axis=1)
    row_and_column = (patch // columns, patch % columns)
    # Static bounds: a side is at most s tokens long.
    distances, frequency = jnp.arange(s), jnp.arange(s // 2 + 1)
    weights = _same_image(sequence)
    for axis, coordinate in enumerate(row_and_column):
        side = grid[..., axis, None]  # [b, j, 1] for the j images of each sequence
        # Only frequencies k >= 0 are summed. Each counts for k and -k, except 0 and m / 2.
        multiplicity = jnp.where((frequency == 0) | (2 * frequency == side), 1, 2)
        multiplicity *= 2 * frequency <= side
        gain = multiplicity * jnp.exp(-jnp.square(frequency / sigma[..., None]) / 2) / side
        # The integer phase is reduced by the period, so that the cosine has a small argument.
        phase = (distances[:, None] * frequency) % side[..., None]
        cosine = jnp.cos(2 * jnp.pi * phase / side[..., None])
        weights_by_distance = jnp.einsum("bjdk,bjk->bjd", cosine, gain, precision=_EXACT)
        weights_by_distance = jnp.take_along_axis(weights_by_distance, image[..., None], axis=1)
        distance = jnp.abs(coordinate[:, :, None] - coordinate[:, None])
        weights *= jnp.take_along_axis(weights_by_distance, jnp.minimum(distance, s - 1), axis=2)
    return weights


def evolution(
    detail_before: Float[Array, "b s"],
    detail_after: Float[Array, "b s"],
    same_image: Float[Array, "b s s"],
    temperature: float,
) -> Float[Array, "b s"]:
    """Maps the relative change of each token's detail in a layer to a factor in (0, 1).

    The detail of a token is the mean magnitude of its channels after a high-pass filter. Its change
    is |after - before| / (mean(before) + before), but at most 1, with the mean over the image. The
    factor is sigmoid(z / `temperature`), where z is the change in standard deviations from the mean
    of the image.

    Args:
        detail_before: [b, s] detail before the layer, of the s slots of b sequences.
        detail_after: [b, s] detail after the layer.
        same_image: [b, s, s] 1 for pairs of visual tokens of the same image, 0 for all other pairs.
        temperature: temperature of the sigmoid.

    Returns:
        [b, s] factors; without meaning for text and padding.
    """
    num_tokens = jnp.maximum(same_image.sum(2), 1)  # of the image of each slot
    mean_before = _weighted_sums(same_image, detail_before) / num_tokens
    change = jnp.abs(detail_after - detail_before) / (mean_before + detail_before + _EPSILON)
    change = jnp.minimum(change, 1)
    deviation = change - _weighted_sums(same_image, change) / num_tokens
    squares = _weighted_sums(same_image, jnp.square(deviation))
    sample_std = jnp.sqrt(squares / jnp.maximum(num_tokens - 1, 1))
    return jax.nn.sigmoid(deviation / (sample_std + _EPSILON) / temperature)
