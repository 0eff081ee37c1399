"""VisionSelector: one small attention head scores every token, the k best are kept.

Zhu et al. (https://arxiv.org/abs/2510.16598). A token's score is the mean logit of its query with
the keys of all tokens of the image. Training multiplies each token by sigmoid(score + t), with t
such that these sum to k, and draws the gates to 0 and 1.
"""

import dataclasses
from collections.abc import Callable
from typing import ClassVar

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from stepprune_jax.policy import Inputs, Progress
from stepprune_jax.policy.jax_settings import implicit_promotion
from stepprune_jax.policy.layers import MASKED
from stepprune_jax.policy.noise import standardise
from stepprune_jax.policy.params import ParamSpec
from stepprune_jax.pruning.base import Ranking
from stepprune_jax.pruning.ordering import by_score
from stepprune_jax.selectors.base import Aux, Weights
from stepprune_jax.selectors.policy import Policy
from stepprune_jax.settings import Settings, number, setting

_EXACT = jax.lax.Precision.HIGHEST


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class VisionSelectorConfig(Settings, path="VisionSelectorConfig"):
    """Shape and training of the scorer; static under `jax.jit`.

    Attributes:
        feature_width: width of the image tokens.
        text_width: 0, as it does not see the question.
        hidden_dim: width of its head; `None` means half of `feature_width`.
        budget: share of an image's tokens kept in training.
        reg_weight_start: weight of the distance of the gates from 0 and 1 at the start of training.
        reg_weight_end: weight at the end; linear in between.
    """

    feature_width: int = setting(3584, "a width from 1", lambda width: width >= 1)
    text_width: int = setting(0, "0: it does not see the question", lambda width: width == 0)
    hidden_dim: int | None = None
    budget: float | int = setting(0.2, "a share in (0, 1]", lambda share: 0 < share <= 1)
    reg_weight_start: float | int = number(0.1)
    reg_weight_end: float | int = number(2.0)

    def __post_init__(self):
        super().__post_init__()
        self.expect("hidden_dim", self.width >= 1, "a width from 1")

    @property
    def width(self) -> int:
        """Width of queries and keys."""
        return self.feature_width // 2 if self.hidden_dim is None else self.hidden_dim


def scores(weights: Weights, inputs: Inputs) -> Float[Array, "b n"]:
    """Scores tokens in float32: query_i . mean_j key_j / sqrt(width), which is linear in x_i."""
    query, key = weights["query"], weights["key"]
    tokens = standardise(jnp.asarray(inputs.image), inputs.stats).astype(jnp.float32)
    tokens = jnp.where(inputs.real[..., None], tokens, 0)
    mean = jnp.sum(tokens, axis=1) / jnp.maximum(1, jnp.sum(inputs.real, axis=1, keepdims=True))
    mean_key = jnp.matmul(mean, key["kernel"], precision=_EXACT) + key["bias"]
    direction = jnp.matmul(mean_key, query["kernel"].T, precision=_EXACT)
    found = jnp.einsum("bnd,bd->bn", tokens, direction, precision=_EXACT)
    offset = jnp.einsum("bh,h->b", mean_key, query["bias"], precision=_EXACT)
    return (found + offset[:, None]) / jnp.sqrt(jnp.float32(mean_key.shape[1]))


def soft_logits(
    scores: Float[Array, "b n"], real: Bool[Array, "b n"], count: Int[Array, "b"]
) -> Float[Array, "b n"]:
    """Returns score + t, whose sigmoids sum to `count`, with the gradient of t."""
    most = jnp.max(scores, axis=1, initial=MASKED, where=real, keepdims=True)
    least = jnp.min(scores, axis=1, initial=-MASKED, where=real, keepdims=True)
    wanted, still = count[:, None].astype(jnp.float32), jax.lax.stop_gradient(scores)

    def total(scores, t):
        return jnp.sum(jnp.where(real, jax.nn.sigmoid(scores + t), 0), axis=1, keepdims=True)

    def halve(_, ends):
        low, high = ends
        middle = (low + high) / 2
        few = total(still, middle) < wanted
        return jnp.where(few, middle, low), jnp.where(few, high, middle)

    ends = jax.lax.stop_gradient((-most - 10, -least + 10))
    low, high = jax.lax.fori_loop(0, 64, halve, ends)
    t = (low + high) / 2
    # A step of Newton's method that changes no value, but has the gradient of the root.
    gates = jax.nn.sigmoid(still + t)
    slope = jnp.sum(jnp.where(real, gates * (1 - gates), 0), axis=1, keepdims=True)
    step = (total(still, t) - total(scores, t)) / jnp.maximum(slope, jnp.finfo(jnp.float32).tiny)
    return scores + t + step


@dataclasses.dataclass(frozen=True)
class VisionSelector(Policy):
    """Keeps the tokens that a trained scorer, which does not see the question, ranks best.

    Attributes:
        config: configuration of the scorer.
    """

    config: VisionSelectorConfig = dataclasses.field(
        default_factory=VisionSelectorConfig, kw_only=True
    )

    name = "visionselector"
    label = "VisionSelector"
    reads_text: ClassVar[bool] = False
    version: ClassVar[int] = 2
    config_type: ClassVar[type | None] = VisionSelectorConfig

    def specs(self) -> Weights:
        """Returns a linear layer for queries, and one for keys."""
        d, h = self.config.feature_width, self.config.width
        layer = {
            "kernel": ParamSpec((d, h), ("embed", "heads"), "token"),
            "bias": ParamSpec((h,), ("heads",), "zeros"),
        }
        return {"query": layer, "key": layer}

    @implicit_promotion()
    def loss(
        self,
        key: Array,
        inputs: Inputs,
        lm_loss_fn: Callable[[Float[Array, "b n d"]], Float[Array, ""]],
        progress: Progress,
    ) -> tuple[Float[Array, ""], Aux]:
        """Adds the gates' distance from the top k to the language-modelling loss."""
        config, real, found = self.config, inputs.real, scores(self.params, inputs)
        count = jnp.maximum(1, jnp.floor(config.budget * jnp.sum(real, axis=1))).astype(jnp.int32)
        logits = soft_logits(found, real, count)
        gates = jnp.where(real, jax.nn.sigmoid(logits), 0)
        image = jnp.asarray(inputs.whole)
        lm_loss = lm_loss_fn((gates[..., None] * image).astype(image.dtype)).astype(jnp.float32)
        rank = jnp.argsort(by_score(found, real), axis=1)
        sign = jnp.where(rank < count[:, None], 1.0, -1.0)
        distance = -jnp.mean(jax.nn.log_sigmoid(sign * logits), where=real)
        start, end = config.reg_weight_start, config.reg_weight_end
        loss = lm_loss + (start + (end - start) * progress.share) * distance
        scalars = {"lm_loss": lm_loss, "distance": distance, "k_mean": jnp.mean(count * 1.0)}
        return loss, Aux(scalars)

    @implicit_promotion()
    def order(self, inputs: Inputs, steps: int, key: Array | None = None) -> Ranking:
        """Orders the tokens by score."""
        return Ranking(by_score(scores(self.params, inputs), inputs.real)[:, :steps])
