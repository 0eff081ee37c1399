"""VisionSelector: a small attention head scores every token, and the k best tokens are kept.

Zhu et al. (https://arxiv.org/abs/2510.16598). The score of a token is the mean logit of its query
with the keys of all tokens of the image. Training multiplies each token by the gate
sigmoid(score + t), where t makes the gates sum to k, and pushes the gates towards 0 and 1.
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

# Full float32 even where the hardware would round products: near-ties decide the selection.
_EXACT = jax.lax.Precision.HIGHEST


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class VisionSelectorConfig(Settings, path="VisionSelectorConfig"):
    """Shape and training of the scorer; a static pytree node under `jax.jit`.

    Attributes:
        feature_width: width of the image tokens.
        text_width: 0, because the scorer does not read the question.
        hidden_dim: width of the attention head; `None` means half of `feature_width`.
        budget: fraction of an image's tokens to keep in training.
        reg_weight_start: weight of the gates' distance from 0 and 1 at the start of training.
        reg_weight_end: weight of the distance at the end; linear in between.
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
        """The width of queries and keys."""
        return self.feature_width // 2 if self.hidden_dim is None else self.hidden_dim


def scores(weights: Weights, inputs: Inputs) -> Float[Array, "b n"]:
    """Computes the score of each token: score_i = query_i . mean_j key_j / sqrt(width).

    The score is linear in token i, so all n^2 pairs of queries and keys are never computed.

    Args:
        weights: linear layers of queries and keys.
        inputs: image tokens; the question is not read.

    Returns:
        [b, n] float32 scores.
    """
    query, key = weights["query"], weights["key"]
    tokens = standardise(jnp.asarray(inputs.image), inputs.stats).astype(jnp.float32)
    tokens = jnp.where(inputs.real[..., None], tokens, 0)
    num_tokens = jnp.sum(inputs.real, axis=1, keepdims=True)
    mean_token = jnp.sum(tokens, axis=1) / jnp.maximum(1, num_tokens)
    mean_key = jnp.matmul(mean_token, key["kernel"], precision=_EXACT) + key["bias"]
    direction = jnp.matmul(mean_key, query["kernel"].T, precision=_EXACT)
    product = jnp.einsum("bnd,bd->bn", tokens, direction, precision=_EXACT)
    offset = jnp.einsum("bh,h->b", mean_key, query["bias"], precision=_EXACT)
    return (product + offset[:, None]) / jnp.sqrt(jnp.float32(mean_key.shape[1]))


def soft_logits(
    scores: Float[Array, "b n"], real: Bool[Array, "b n"], count: Int[Array, "b"]
) -> Float[Array, "b n"]:
    """Shifts the scores of each row so that their sigmoids, the gates, sum to `count`.

    Args:
        scores: [b, n] score of each token.
        real: [b, n] True at real tokens.
        count: [b] sum of the gates of each row.

    Returns:
        [b, n] logits score + t. The gradient includes the derivative of the shift t.
    """
    max_score = jnp.max(scores, axis=1, initial=MASKED, where=real, keepdims=True)
    min_score = jnp.min(scores, axis=1, initial=-MASKED, where=real, keepdims=True)
    target, fixed_scores = count[:, None].astype(jnp.float32), jax.lax.stop_gradient(scores)

    def gate_sum(scores, t):
        return jnp.sum(jnp.where(real, jax.nn.sigmoid(scores + t), 0), axis=1, keepdims=True)

    def halve(_, bracket):
        low, high = bracket
        middle = (low + high) / 2
        is_below = gate_sum(fixed_scores, middle) < target
        return jnp.where(is_below, middle, low), jnp.where(is_below, high, middle)

    # Find t by bisection. At the ends of the bracket all gates are below e^-10 or above 1 - e^-10.
    bracket = jax.lax.stop_gradient((-max_score - 10, -min_score + 10))
    low, high = jax.lax.fori_loop(0, 64, halve, bracket)
    t = (low + high) / 2
    # A Newton step of value 0, whose gradient is the gradient of the root t.
    gates = jax.nn.sigmoid(fixed_scores + t)
    slope = jnp.sum(jnp.where(real, gates * (1 - gates), 0), axis=1, keepdims=True)
    excess = gate_sum(scores, t) - gate_sum(fixed_scores, t)
    newton_step = -excess / jnp.maximum(slope, jnp.finfo(jnp.float32).tiny)
    return scores + t + newton_step


@dataclasses.dataclass(frozen=True)
class VisionSelector(Policy):
    """Keeps the tokens with the best scores of a trained scorer that does not read the question.

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
        """Returns the specifications of a linear layer for queries and another for keys."""
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
        """Computes the language-modeling loss plus the distance of the gates from 0 and 1.

        Args:
            key: not used.
            inputs: image and question, never the answer.
            lm_loss_fn: maps the gated tokens [b, n, d] to the mean language-modeling loss.
            progress: progress of training; sets the weight of the distance.

        Returns:
            The loss and its metrics.
        """
        config, real, token_scores = self.config, inputs.real, scores(self.params, inputs)
        count = jnp.maximum(1, jnp.floor(config.budget * jnp.sum(real, axis=1))).astype(jnp.int32)
        logits = soft_logits(token_scores, real, count)
        gates = jnp.where(real, jax.nn.sigmoid(logits), 0)
        image = jnp.asarray(inputs.with_deepstack)
        lm_loss = lm_loss_fn((gates[..., None] * image).astype(image.dtype)).astype(jnp.float32)
        # Gates of the `count` best tokens are pushed to 1, all other gates to 0. The weight of this
        # distance grows linearly over training.
        rank = jnp.argsort(by_score(token_scores, real), axis=1)
        sign = jnp.where(rank < count[:, None], 1.0, -1.0)
        distance = -jnp.mean(jax.nn.log_sigmoid(sign * logits), where=real)
        start_weight, end_weight = config.reg_weight_start, config.reg_weight_end
        weight = start_weight + (end_weight - start_weight) * progress.share
        loss = lm_loss + weight * distance
        metrics = {"lm_loss": lm_loss, "distance": distance, "k_mean": jnp.mean(count * 1.0)}
        return loss, Aux(metrics)

    @implicit_promotion()
    def order(self, inputs: Inputs, steps: int, key: Array | None = None) -> Ranking:
        """Orders the tokens by score."""
        return Ranking(by_score(scores(self.params, inputs), inputs.real)[:, :steps])
