"""TopV: drops visual tokens that contribute little to a layer's output, after this layer.

Yang et al. (https://arxiv.org/abs/2503.18278), who published no program. The contribution is
computed by optimal transport from the layer's inputs to the inputs of its MLP. The cost is a sum of
feature distance, distance on the grid and distance from the center of the image. The importance of
a token is the mass that it sends in Sinkhorn's algorithm. The most important tokens remain, and
some evenly spaced other tokens, so that all parts of the image are represented.
"""

import dataclasses
import functools
import operator
from typing import ClassVar

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from stepprune_jax.models.attention import Tap
from stepprune_jax.models.config import ModelConfig
from stepprune_jax.models.sequence import Sequence
from stepprune_jax.pruning.base import LayerCut, LayerPruner
from stepprune_jax.pruning.ordering import evenly, keep_best, require_grid

# Replaces minus infinity, so that no difference of masked values is NaN.
_LOWEST = -1e30


@dataclasses.dataclass(frozen=True)
class TopV(LayerPruner):
    """Keeps the visual tokens that send the most mass in an optimal transport through a layer.

    Attributes:
        layer: the layer; later layers process only the remaining tokens.
        alpha: weight of the Euclidean distance between features.
        beta: weight of 1 - exp(-d^2 / (2 sigma^2)), where d is the distance on the grid.
        gamma: weight of the source's distance from the center of the grid.
        sigma: length scale of neighborhoods on the grid, in patches.
        epsilon: weight of the entropy.
        iterations: number of iterations of Sinkhorn's algorithm.
        recover_every: one in this many kept tokens is taken evenly from the less important tokens;
            0 disables this.
    """

    layer: int = 2
    alpha: float = 1.0
    beta: float = 1.0
    gamma: float = 0.01
    sigma: float = 10.0
    epsilon: float = 0.1
    iterations: int = 3
    recover_every: int = 4

    name = "topv"
    label = "TopV"
    reads_videos: ClassVar[bool] = False

    def check(self, config: ModelConfig, num_tokens: int) -> None:
        """Rejects a layer without a later layer, and numbers out of range."""
        super().check(config, num_tokens)
        require_grid(config, self.name)
        max_layer = config.text.num_layers - 2
        self.expect("layer", 0 <= self.layer <= max_layer, f"0 to {max_layer}")
        for option in ("sigma", "epsilon", "iterations"):
            self.expect(option, getattr(self, option) > 0, "more than 0")
        for option in ("alpha", "beta", "gamma", "recover_every"):
            self.expect(option, getattr(self, option) >= 0, "0 or more")

    def cuts(self, config: ModelConfig, num_tokens: int) -> tuple[LayerCut, ...]:
        """Returns the cut after the layer."""
        taps = (Tap("hidden", self.layer), Tap("mlp_input", self.layer))
        return (LayerCut(self.layer + 1, taps),)

    def drop(
        self,
        cut: LayerCut,
        sequence: Sequence,
        taps: dict[str, Array],
        count: Int[Array, "b j"],
    ) -> tuple[Sequence, Bool[Array, "b s"]]:
        """Keeps the most important tokens and some evenly spaced other tokens.

        Args:
            cut: the cut, with taps of the layer's inputs and of the inputs of its MLP.
            sequence: the padded sequences at the cut; a slot is a position in them.
            taps: values of the taps by name.
            count: [b, j] number of tokens to keep of each of the j images of b sequences.

        Returns:
            The sequences, unchanged, and [b, s] True at the slots that remain.
        """
        layer_input, mlp_input = (
            taps[f"{tap.kind}.{tap.layer}"].astype(jnp.float32) for tap in cut.taps
        )
        image = sequence.image
        same_image = (image[:, None] == image[..., None]) & (image >= 0)[:, None]
        cost = self.cost(layer_input, mlp_input, sequence, same_image)
        source_mass, target_mass = (
            _normalise(jnp.linalg.norm(x, axis=2), same_image) for x in (layer_input, mlp_input)
        )
        importance = contributions(
            cost,
            source_mass,
            target_mass,
            same_image,
            epsilon=self.epsilon,
            iterations=self.iterations,
        )
        num_recovered = count // self.recover_every if self.recover_every else jnp.zeros_like(count)
        keep = keep_best(importance, image, count - num_recovered)
        is_in_image = image[:, None] == jnp.arange(count.shape[1])[:, None]  # [b, j, s]
        recovered = jnp.any(evenly(is_in_image & ~keep[:, None], num_recovered), axis=1)
        return sequence, keep | recovered

    def cost(
        self,
        source: Float[Array, "b s e"],
        target: Float[Array, "b s e"],
        sequence: Sequence,
        same_image: Bool[Array, "b s s"],
    ) -> Float[Array, "b s s"]:
        """Returns the cost of moving each source to each target of its image.

        The cost is a weighted sum of three terms, each scaled to [0, 1] over an image.

        Args:
            source: [b, s, e] inputs of the layer, for the s slots of b sequences.
            target: [b, s, e] inputs of the layer's MLP.
            sequence: the sequences, with the image, index and grid of visual tokens.
            same_image: [b, s, s] True at pairs of tokens of the same image.

        Returns:
            [b, s, s] costs; undefined for pairs outside `same_image`.
        """
        exact = jax.lax.Precision.HIGHEST
        source_squares, target_squares = (jnp.square(x).sum(2) for x in (source, target))
        product = jnp.einsum("bse,bte->bst", source, target, precision=exact)
        # |a - b|^2 = |a|^2 + |b|^2 - 2 a b, which rounding may make negative.
        squared_distance = source_squares[..., None] + target_squares[:, None] - 2 * product
        feature_distance = jnp.sqrt(jnp.maximum(squared_distance, 0))
        position, centre = _grid_positions(sequence)
        squared_distance = jnp.square(position[:, :, None] - position[:, None]).sum(3)
        grid_distance = 1 - jnp.exp(-squared_distance / (2 * self.sigma**2))
        centre_distance = jnp.sqrt(jnp.square(position - centre).sum(2))
        centre_distance = jnp.broadcast_to(centre_distance[..., None], same_image.shape)
        weighted_terms = (
            (self.alpha, feature_distance),
            (self.beta, grid_distance),
            (self.gamma, centre_distance),
        )
        return functools.reduce(
            operator.add,
            (weight * _scale_to_unit(term, same_image) for weight, term in weighted_terms),
        )


def _grid_positions(sequence: Sequence) -> tuple[Float[Array, "b s 2"], Float[Array, "b s 2"]]:
    """Returns the row and column of each visual token, and of the center of its image."""
    image_index = jnp.maximum(sequence.image, 0)
    assert sequence.grid is not None  # there are images
    grid = jnp.take_along_axis(sequence.grid, image_index[..., None], axis=1)
    patch = jnp.maximum(sequence.index, 0)
    position = jnp.stack([patch // grid[..., 1], patch % grid[..., 1]], axis=2)
    return position.astype(jnp.float32), (grid - 1) / 2


def _scale_to_unit(
    x: Float[Array, "b s s"], same_image: Bool[Array, "b s s"]
) -> Float[Array, "b s s"]:
    """Scales the values of each image's pairs linearly to [0, 1]; other pairs are undefined."""

    def max_over_pairs(values: Float[Array, "b s s"]) -> Float[Array, "b s 1"]:
        max_over_targets = jnp.max(jnp.where(same_image, values, _LOWEST), axis=2)
        return _image_max(max_over_targets, same_image)[..., None]

    low, high = -max_over_pairs(-x), max_over_pairs(x)
    return (x - low) / jnp.where(high > low, high - low, 1)


def _image_max(
    values: Float[Array, "b s"], same_image: Bool[Array, "b s s"]
) -> Float[Array, "b s"]:
    """Returns, for each token, the largest value of all tokens of its image."""
    return jnp.max(jnp.where(same_image, values[:, None], _LOWEST), axis=2)


def _normalise(
    values: Float[Array, "b s"], same_image: Bool[Array, "b s s"]
) -> Float[Array, "b s"]:
    """Divides the value of each token by the sum over its image."""
    tiny = jnp.finfo(jnp.float32).tiny
    return (values + tiny) / (
        jnp.sum(jnp.where(same_image, values[:, None] + tiny, 0), axis=2) + tiny
    )


def contributions(
    cost: Float[Array, "b s s"],
    source: Float[Array, "b s"],
    target: Float[Array, "b s"],
    same_image: Bool[Array, "b s s"],
    *,
    epsilon: float,
    iterations: int,
) -> Float[Array, "b s"]:
    """Returns the mass that each token sends in an entropy-regularized optimal transport.

    The transport plan is computed by Sinkhorn's algorithm in log space. Every iteration scales the
    rows of exp(-cost / epsilon) to the masses of the sources, and then the columns to the masses of
    the targets. The columns are scaled last: otherwise every source would send exactly its mass,
    whatever the cost.

    Args:
        cost: [b, s, s] cost of moving mass from each source to each target.
        source: [b, s] masses of the sources, with sum 1 over each image.
        target: [b, s] masses of the targets, with sum 1 over each image.
        same_image: [b, s, s] True at pairs of tokens of the same image. Mass moves only between
            these pairs.
        epsilon: weight of the entropy.
        iterations: number of iterations.

    Returns:
        [b, s] masses; without meaning for text and padding.
    """
    log_kernel = jnp.where(same_image, -cost / epsilon, _LOWEST)
    is_visual = jnp.any(same_image, axis=2)
    log_source, log_target = (jnp.log(jnp.where(is_visual, x, 1)) for x in (source, target))

    def scale_rows_and_columns(log_scales, _):
        _, log_columns = log_scales
        row_sums = jax.nn.logsumexp(log_kernel + log_columns[:, None], axis=2)
        log_rows = jnp.where(is_visual, log_source - row_sums, 0)
        column_sums = jax.nn.logsumexp(log_kernel + log_rows[..., None], axis=1)
        log_columns = jnp.where(is_visual, log_target - column_sums, 0)
        return (log_rows, log_columns), None

    start = (jnp.zeros_like(source), jnp.zeros_like(target))
    (log_rows, log_columns), _ = jax.lax.scan(scale_rows_and_columns, start, length=iterations)
    return jnp.exp(log_rows + jax.nn.logsumexp(log_kernel + log_columns[:, None], axis=2))
