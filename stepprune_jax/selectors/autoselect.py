"""An AutoSelect-like baseline: every token scored once, the k best kept.

After AutoSelect (https://arxiv.org/abs/2603.07135): the same noise gate and SoftTopK as StepPrune,
but no sequence of choices and no stop. To make the two comparable, this one shares StepPrune's
encoder with the question, its denoiser, its feature statistics and its random budgets, so that only
the way of ordering tokens differs.

With `diversity`, a control for what a sequence of choices gains: the same scores, but each token is
chosen for its score and for its distance from those before it, by maximal marginal relevance
(Carbonell and Goldstein, SIGIR 1998, https://doi.org/10.1145/290941.291025).
"""

import dataclasses
from collections.abc import Callable
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike
from jaxtyping import Array, Bool, Float, Int

from stepprune_jax import policy
from stepprune_jax.policy import Inputs, Limits, PolicyConfig, Progress, SampledSubsets
from stepprune_jax.policy.budget import RANDOM_BUDGET, budget_range, draw_budgets
from stepprune_jax.policy.jax_settings import AnyKey, implicit_promotion, threefry
from stepprune_jax.policy.layers import MASKED, layer_norm, score_dtype
from stepprune_jax.policy.noise import gate_tokens, standardise
from stepprune_jax.policy.objective import gate_metrics
from stepprune_jax.policy.params import ParamSpec
from stepprune_jax.policy.params import param_specs as policy_specs
from stepprune_jax.policy.rollout import gumbel, read_key
from stepprune_jax.policy.scores import cosine_anneal
from stepprune_jax.policy.selection import first_picks
from stepprune_jax.policy.soft_topk import cumlogsumexp
from stepprune_jax.pruning.base import Ranking
from stepprune_jax.pruning.divprune import farthest_first
from stepprune_jax.pruning.ordering import unit_vectors
from stepprune_jax.selectors.base import Aux
from stepprune_jax.selectors.policy import Policy
from stepprune_jax.settings import Settings, setting
from stepprune_jax.user_input import UserError

Params = dict[str, Any]


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class AutoSelectConfig(Settings, path="AutoSelectConfig"):
    """Shape and training of the one-shot scorer; static under `jax.jit`.

    Attributes:
        feature_width: width of the image tokens.
        text_width: width of the text embeddings; 0 builds a scorer that sees no text.
        width: width of the encoder; `None` means `feature_width`.
        num_heads: attention heads of the encoder.
        mlp_ratio: hidden width of each MLP over `width`.
        encoder_layers: blocks of the encoder.
        temperature_start: tau of SoftTopK at the start of training.
        temperature_end: tau at the end of annealing and afterwards.
        temperature_steps: share of training over which tau anneals, by a cosine.
        draw: temperature at which tokens are drawn from the softmax of the scores, in training and
            for inference alike; 0 takes the best.
        random_budget: range of budgets as fractions of N, drawn log-uniformly for each row.
        budget_anneal: share of training over which the lower end of that range falls from 30 %; 0
            for none.
        dtype: compute dtype of encoder and denoiser; `None` takes that of the features, but at
            least float32. Scores are at least float32 in any case.
    """

    feature_width: int = 1024
    text_width: int = 4096
    width: int | None = None
    num_heads: int = 16
    mlp_ratio: int = 4
    encoder_layers: int = 4
    temperature_start: float | int = setting(2.0, "a positive number", lambda value: value > 0)
    temperature_end: float | int = setting(0.4, "a positive number", lambda value: value > 0)
    temperature_steps: float | int = setting(
        0.9, "a share of training in (0, 1]", lambda share: 0 < share <= 1
    )
    draw: float | int = 1.0
    random_budget: tuple[float | int, float | int] = setting(
        RANDOM_BUDGET,
        "fractions 0 < low <= high <= 1",
        lambda pair: len(pair) == 2 and 0 < pair[0] <= pair[1] <= 1,
    )
    budget_anneal: float | int = 0.7
    dtype: str | None = None

    def __post_init__(self):
        super().__post_init__()
        try:
            self.shape  # noqa: B018  Its checks are those of the shared fields.
        except ValueError as error:
            message = str(error).replace("PolicyConfig.", "AutoSelectConfig.")
            raise UserError(message) from error

    @property
    def shape(self) -> PolicyConfig:
        """The StepPrune configuration with the same encoder and denoiser."""
        return PolicyConfig(
            feature_width=self.feature_width,
            text_width=self.text_width,
            width=self.width,
            num_heads=self.num_heads,
            mlp_ratio=self.mlp_ratio,
            encoder_layers=self.encoder_layers,
            budget_anneal=self.budget_anneal,
            first_query="learned",  # it asks none
            draw=self.draw,
            dtype=self.dtype,
        )

    @property
    def policy_width(self) -> int:
        """Width d of the encoder."""
        return self.shape.policy_width


class GatedByScores(NamedTuple):
    """Result of the training pathway: all N tokens, each as noisy as the scorer decides.

    Attributes:
        tokens: denoised tokens, full length, in the space of the given features.
        alpha: gate of each token.
        budget: k of SoftTopK.
        scores: one score per token, with the noise of the draw; padding scores lowest.
    """

    tokens: Float[Array, "b n d"]
    alpha: Float[Array, "b n"]
    budget: Int[Array, "b"]
    scores: Float[Array, "b n"]


def temperature(config: AutoSelectConfig, progress: ArrayLike) -> Float[Array, ""]:
    """Returns tau at a share `progress` of training: a cosine from start to end, then constant."""
    share = progress / config.temperature_steps
    return cosine_anneal(config.temperature_start, config.temperature_end, share)


def scores(
    params: Params,
    config: AutoSelectConfig,
    inputs: Inputs,
    text_gate: ArrayLike = 1.0,
) -> Float[Array, "b n"]:
    """Computes one score per token, in at least float32; padding scores lowest."""
    encoded = policy.encode(params, config.shape, inputs, text_gate)
    head, wide = params["head"], encoded.astype(score_dtype(encoded.dtype))
    wide = layer_norm(head["norm"], wide)
    found = (wide @ head["kernel"].astype(wide.dtype))[..., 0]
    return jnp.where(inputs.image_mask, found, MASKED) if inputs.image_mask is not None else found


def drawn(
    scores: Float[Array, "b n"], key: Array | None, temperature: float | int
) -> Float[Array, "b n"]:
    """Adds Gumbel noise to scores, so that the k best are a draw without replacement.

    At a temperature of 0 they are returned as they are.
    """
    if not temperature:
        return scores
    b, n = scores.shape
    return scores + gumbel(temperature, read_key(key, b), jnp.int32(0), n, scores.dtype)


def gate(
    params: Params,
    config: AutoSelectConfig,
    key: Array,
    inputs: Inputs,
    progress: Progress,
    draw: float | int | None = None,
) -> GatedByScores:
    """Gates all tokens for a differentiable consumer; `key` is consumed (budgets and noise).

    Tokens are drawn at the temperature `draw`, by default the configuration's. Every row draws its
    own budget, log-uniform over `config.random_budget`, so that one scorer serves all budgets.
    """
    n = inputs.image.shape[1]
    budget_key, noise_key = jax.random.split(key)
    keys = jax.random.split(jax.random.fold_in(budget_key, 2), inputs.image.shape[0])
    found = scores(params, config, inputs, progress.text_gate)
    found = drawn(found, keys, config.draw if draw is None else draw)
    shares = budget_range(config.random_budget, config.budget_anneal, progress.share)
    budget = draw_budgets(budget_key, jnp.sum(inputs.real, axis=1), n, shares)
    tau = temperature(config, progress.share)
    alpha = policy.soft_topk(found, budget, tau, where=inputs.image_mask)
    tokens = gate_tokens(params, config.shape, noise_key, inputs, alpha)
    return GatedByScores(tokens, alpha, budget, found)


def metrics(gated: GatedByScores, real: Bool[Array, "b n"]) -> dict[str, Float[Array, ""]]:
    """Returns scalars that show whether the scorer learns.

    `k_mean`: mean budget. `alpha_in`, `alpha_out`: mean gate inside and outside the hard top k.
    `iou`: agreement of {alpha > 1/2} with it.
    """
    rank = jnp.argsort(best_first(gated.scores), axis=1)
    chosen = real & (rank < gated.budget[:, None])
    mean = jnp.mean(gated.budget.astype(jnp.float32))
    return {"k_mean": mean, **gate_metrics(gated.alpha, chosen, real)}


def entropy(scores: Float[Array, "b n"]) -> Float[Array, ""]:
    """Returns the mean entropy of the scores' softmax, in nats."""
    log_prob = jax.nn.log_softmax(scores, axis=-1)
    return -jnp.mean(jnp.sum(jnp.exp(log_prob) * log_prob, axis=-1))


def best_first(scores: Float[Array, "b n"]) -> Int[Array, "b n"]:
    """Orders tokens by score, best first, ties by position; the first k are the choice."""
    return jnp.argsort(-scores, axis=1, stable=True).astype(jnp.int32)


def by_marginal_relevance(
    scores: Float[Array, "b n"],
    unit: Float[Array, "b n d"],
    real: Bool[Array, "b n"],
    steps: int,
    diversity: float,
) -> Int[Array, "b t"]:
    """Orders tokens greedily by (1 - diversity) score - diversity max cosine with earlier ones.

    Args:
        scores: of each token; they are scaled to [0, 1] in each row.
        unit: tokens of length 1.
        real: True = token, at least one of each row.
        steps: static number of tokens to order.
        diversity: the weight.

    Returns:
        [b, t] int32 indices, best first, undefined where no token is left.
    """
    found = scores.astype(jnp.float32)
    low = jnp.min(found, axis=1, initial=-MASKED, where=real, keepdims=True)
    spread = jnp.max(found, axis=1, initial=MASKED, where=real, keepdims=True) - low
    relevance = jnp.where(real, (found - low) / jnp.where(spread > 0, spread, 1), 0)
    # The distance of `farthest_first` is one minus the cosine; the constant changes no order.
    return farthest_first(unit, real, steps, relevance, diversity)


@dataclasses.dataclass(frozen=True)
class AutoSelect(Policy):
    """Keeps the tokens that a trained one-shot scorer ranks best.

    Attributes:
        config: configuration of the scorer.
        seed: seed of the draws, of a scorer that draws its tokens.
        draw: temperature of the draws, 0 for none; None for the scorer's own.
        diversity: weight in [0, 1] of the largest cosine between a token and those chosen before
            it, against the score; 0 for the score alone.
    """

    config: AutoSelectConfig = dataclasses.field(default_factory=AutoSelectConfig, kw_only=True)
    seed: int = 0
    draw: float | None = None
    diversity: float = 0.0

    name = "autoselect"
    label = "AutoSelect-like"
    samples_subsets: ClassVar[bool] = True
    config_type: ClassVar[type | None] = AutoSelectConfig
    version: ClassVar[int] = 3
    settings: ClassVar[str] = "autoselect"

    def __post_init__(self):
        super().__post_init__()
        self.expect("diversity", 0 <= self.diversity <= 1, "a number from 0 to 1")

    def specs(self) -> Params:
        """Returns StepPrune's encoder and denoiser, and a head of one logit."""
        shared, d = policy_specs(self.config.shape), self.config.policy_width
        head = {
            # Without biases: they would shift all scores of a row alike, and SoftTopK ignores that.
            "norm": {"scale": ParamSpec((d,), (None,), "ones")},
            "kernel": ParamSpec((d, 1), ("embed", None), "fan_in"),
        }
        return {"encoder": shared["encoder"], "denoiser": shared["denoiser"], "head": head}

    @implicit_promotion()
    def loss(
        self,
        key: Array,
        inputs: Inputs,
        lm_loss_fn: Callable[[Float[Array, "b n d"]], Float[Array, ""]],
        progress: Progress,
    ) -> tuple[Float[Array, ""], Aux]:
        """Computes the language-modelling loss on softly selected tokens."""
        gated = gate(self.params, self.config, key, inputs, progress, self.draw)
        loss = lm_loss_fn(gated.tokens).astype(score_dtype(gated.tokens.dtype))
        scalars = {"lm_loss": loss} | metrics(gated, inputs.real)
        return loss, Aux(scalars)

    @implicit_promotion()
    def sample_subsets(
        self, inputs: Inputs, limits: Limits, keys: AnyKey, progress: Progress
    ) -> SampledSubsets:
        """Draws from the Plackett-Luce distribution of the scores, at a temperature of 1."""
        b, n = inputs.image.shape[:2]
        found = scores(self.params, self.config, inputs, progress.text_gate)
        most = limits.max_tokens if limits.budget is None else limits.budget
        most = jnp.minimum(n if most is None else most, jnp.sum(inputs.real, axis=1))

        def one(key):
            noisy = jax.lax.stop_gradient(drawn(found, jax.random.split(key, b), 1.0))
            order = best_first(noisy)
            ordered = jnp.take_along_axis(found, order, axis=1)
            # Of the softmax over this token and all later ones.
            log_sum = cumlogsumexp(ordered, reverse=True)
            kept = jnp.arange(n) < most[:, None]
            log_prob = jnp.sum(jnp.where(kept, ordered - log_sum, 0), axis=1)
            return first_picks(order, most, n), log_prob

        picks, log_prob = jax.vmap(one)(threefry(keys))
        return SampledSubsets(picks, log_prob, entropy(found))

    @implicit_promotion()
    def order(self, inputs: Inputs, steps: int, key: Array | None = None) -> Ranking:
        """Orders the tokens by score, and by how little they resemble those before them."""
        draw = self.config.draw if self.draw is None else self.draw
        found = drawn(scores(self.params, self.config, inputs), key, draw)
        if not self.diversity:
            return Ranking(best_first(found)[:, :steps])
        tokens = standardise(jnp.asarray(inputs.image), inputs.stats)
        unit, real = unit_vectors(tokens, inputs.real), inputs.real
        return Ranking(by_marginal_relevance(found, unit, real, steps, self.diversity))

    @property
    def encoder_config(self) -> PolicyConfig:
        """The StepPrune configuration with the same encoder and denoiser."""
        return self.config.shape

    def open_scores(
        self, inputs: Inputs, budget: int
    ) -> tuple[Float[Array, "b n"], Float[Array, ""]]:
        """Returns the scores, and the mean entropy of their softmax."""
        found = scores(self.params, self.config, inputs)
        return found, entropy(found)
