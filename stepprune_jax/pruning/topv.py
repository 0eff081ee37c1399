"""TopV: visual tokens that contribute little to a layer's output are dropped after it.

Yang et al. (https://arxiv.org/abs/2503.18278), who published no program. The layer's inputs are
transported to the inputs of its MLP, at a cost of feature distance, distance on the grid and
distance from the middle of the image. A token's importance is the mass that it gives under
Sinkhorn's algorithm; the most important tokens remain, and some evenly spaced others, so that no
part of the image is lost.
"""

import dataclasses
import functools
import operator

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from stepprune_jax.models.attention import Tap
from stepprune_jax.models.config import ModelConfig
from stepprune_jax.models.sequence import Sequence
from stepprune_jax.pruning.base import LayerCut, LayerPruner
from stepprune_jax.pruning.ordering import evenly, keep_best, require_grid

_LOWEST = -1e30


@dataclasses.dataclass(frozen=True)
class TopV(LayerPruner):
    """Keeps the visual tokens that give most mass in an optimal transport through a layer.

    Attributes:
        layer: the layer; later ones see only the remaining tokens.
        alpha: weight of the Euclidean distance of features.
        beta: weight of 1 - exp(-d^2 / (2 sigma^2)), d the distance on the grid.
        gamma: weight of the source's distance from the middle of the grid.
        sigma: length scale of neighbourhoods on the grid, in patches.
        epsilon: weight of the entropy.
        iterations: iterations of Sinkhorn's algorithm.
        recover_every: one in this many kept tokens is taken evenly from the less important ones; 0
            for none.
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

    def check(self, config: ModelConfig, num_tokens: int) -> None:
        """Rejects a layer without one after it, and numbers out of range."""
        super().check(config, num_tokens)
        require_grid(config, self.name)
        last = config.text.num_layers - 2
        self.expect("layer", 0 <= self.layer <= last, f"0 to {last}")
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
        """Keeps the most important tokens and some of the others."""
        source, target = (taps[f"{tap.kind}.{tap.layer}"].astype(jnp.float32) for tap in cut.taps)
        image = sequence.image
        same = (image[:, None] == image[..., None]) & (image >= 0)[:, None]
        cost = self.cost(source, target, sequence, same)
        given, taken = (_shares(jnp.linalg.norm(x, axis=2), same) for x in (source, target))
        importance = contributions(cost, given, taken, same, self.epsilon, self.iterations)
        recovered = count // self.recover_every if self.recover_every else jnp.zeros_like(count)
        keep = keep_best(importance, image, count - recovered)
        of_image = image[:, None] == jnp.arange(count.shape[1])[:, None]
        return sequence, keep | jnp.any(evenly(of_image & ~keep[:, None], recovered), axis=1)

    def cost(
        self,
        source: Float[Array, "b s e"],
        target: Float[Array, "b s e"],
        sequence: Sequence,
        same: Bool[Array, "b s s"],
    ) -> Float[Array, "b s s"]:
        """Returns the cost of moving each source to each target of its image.

        It is a sum of three terms, each scaled to 0 to 1 over an image; undefined where `same`,
        that two tokens are of one image, is False.
        """
        exact = jax.lax.Precision.HIGHEST
        squares = [jnp.square(x).sum(2) for x in (source, target)]
        product = jnp.einsum("bse,bte->bst", source, target, precision=exact)
        feature = squares[0][..., None] + squares[1][:, None] - 2 * product
        feature = jnp.sqrt(jnp.maximum(feature, 0))
        place, middle = _on_grid(sequence)
        apart = jnp.square(place[:, :, None] - place[:, None]).sum(3)
        spatial = 1 - jnp.exp(-apart / (2 * self.sigma**2))
        central = jnp.sqrt(jnp.square(place - middle).sum(2))
        central = jnp.broadcast_to(central[..., None], same.shape)
        terms = ((self.alpha, feature), (self.beta, spatial), (self.gamma, central))
        parts = (weight * _from_0_to_1(term, same) for weight, term in terms)
        return functools.reduce(operator.add, parts)


def _on_grid(sequence: Sequence) -> tuple[Float[Array, "b s 2"], Float[Array, "b s 2"]]:
    """Returns row and column of each visual token, and those of the middle of its image."""
    at = jnp.maximum(sequence.image, 0)
    assert sequence.grid is not None  # there are images
    grid = jnp.take_along_axis(sequence.grid, at[..., None], axis=1)
    patch = jnp.maximum(sequence.index, 0)
    place = jnp.stack([patch // grid[..., 1], patch % grid[..., 1]], axis=2)
    return place.astype(jnp.float32), (grid - 1) / 2


def _from_0_to_1(x: Float[Array, "b s s"], same: Bool[Array, "b s s"]) -> Float[Array, "b s s"]:
    """Scales values to [0, 1] over the pairs of each image."""
    low, high = (
        sign * _largest(jnp.max(jnp.where(same, sign * x, _LOWEST), axis=2), same)[..., None]
        for sign in (-1, 1)
    )
    return (x - low) / jnp.where(high > low, high - low, 1)


def _largest(x: Float[Array, "b s"], same: Bool[Array, "b s s"]) -> Float[Array, "b s"]:
    """Returns the largest value over each token's image."""
    return jnp.max(jnp.where(same, x[:, None], _LOWEST), axis=2)


def _shares(x: Float[Array, "b s"], same: Bool[Array, "b s s"]) -> Float[Array, "b s"]:
    """Returns each token's share of the sum over its image."""
    tiny = jnp.finfo(jnp.float32).tiny
    return (x + tiny) / (jnp.sum(jnp.where(same, x[:, None] + tiny, 0), axis=2) + tiny)


def contributions(
    cost: Float[Array, "b s s"],
    source: Float[Array, "b s"],
    target: Float[Array, "b s"],
    same: Bool[Array, "b s s"],
    epsilon: float,
    iterations: int,
) -> Float[Array, "b s"]:
    """Transports masses with Sinkhorn's algorithm, and returns the mass each source gives.

    Every iteration scales the rows of exp(-cost / epsilon) to the sources' masses and then its
    columns to the targets'. The columns come last: otherwise every source would give exactly its
    mass, whatever the cost. Masses sum to 1 over each image, and stay in it (`same`).
    """
    kernel = jnp.where(same, -cost / epsilon, _LOWEST)
    present = jnp.any(same, axis=2)
    source, target = (jnp.log(jnp.where(present, x, 1)) for x in (source, target))

    def iteration(scales, _):
        _, columns = scales
        given = jax.nn.logsumexp(kernel + columns[:, None], axis=2)
        rows = jnp.where(present, source - given, 0)
        taken = jax.nn.logsumexp(kernel + rows[..., None], axis=1)
        return (rows, jnp.where(present, target - taken, 0)), None

    start = (jnp.zeros_like(source), jnp.zeros_like(target))
    rows, columns = jax.lax.scan(iteration, start, length=iterations)[0]
    return jnp.exp(rows + jax.nn.logsumexp(kernel + columns[:, None], axis=2))
