"""An AutoSelect-like baseline: scores every token once and keeps the k best tokens.

After AutoSelect (https://arxiv.org/abs/2603.07135): the noise gate and SoftTopK of StepPrune, but
no sequential choice and no stop. For a fair comparison, this baseline uses StepPrune's encoder with
the question, denoiser, feature statistics and random budgets. Only the order of tokens differs.

The option `diversity` is a control for the gain of sequential choices. Tokens are then chosen one
by one for their score and their distance from earlier choices, by maximal marginal relevance
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
from stepprune_jax.policy import (
    Inputs,
    Limits,
    PolicyConfig,
    Progress,
    SampledSubsets,
    WarmStart,
)
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
from stepprune_jax.policy.warm_start import WARM_START_STEPS, normalize_importance
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
    """Shape and training of the one-shot scorer; a static pytree node under `jax.jit`.

    Attributes:
        feature_width: width of the image tokens.
        text_width: width of the text embeddings; 0 builds a scorer that reads no text.
        width: width of the encoder; `None` means `feature_width`.
        num_heads: number of attention heads of the encoder.
        mlp_ratio: hidden width of each MLP, as a multiple of `width`.
        encoder_layers: number of blocks of the encoder.
        temperature_start: tau of SoftTopK at the start of training.
        temperature_end: tau of SoftTopK at the end of annealing and afterwards.
        temperature_steps: fraction of training over which tau is annealed, by a cosine.
        draw: sampling temperature of the softmax of the scores, in training and inference; 0 takes
            the best tokens.
        random_budget: range of the random budgets, as fractions of N; log-uniform for each row.
        budget_anneal: fraction of training over which the lower end of `random_budget` falls from
            30 %; 0 disables annealing.
        dtype: compute dtype of encoder and denoiser. `None` takes the dtype of the features, but at
            least float32. Scores are always at least float32.
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
            self.shape  # noqa: B018  PolicyConfig checks the fields that both classes share.
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
            first_query="learned",  # the scorer has no decoder and so no first query
            draw=self.draw,
            dtype=self.dtype,
        )

    @property
    def policy_width(self) -> int:
        """The width d of the encoder."""
        return self.shape.policy_width


class GatedByScores(NamedTuple):
    """Result of the training pathway: all N tokens, each with as much noise as its gate says.

    Attributes:
        tokens: all N tokens, denoised, in the space of the input features.
        alpha: gate of each token, in [0, 1].
        budget: k of SoftTopK.
        scores: score of each token, with sampling noise; the lowest score in the padding.
    """

    tokens: Float[Array, "b n d"]
    alpha: Float[Array, "b n"]
    budget: Int[Array, "b"]
    scores: Float[Array, "b n"]


def temperature(config: AutoSelectConfig, progress: ArrayLike) -> Float[Array, ""]:
    """Returns tau of SoftTopK, given the completed fraction of training."""
    anneal_progress = progress / config.temperature_steps
    return cosine_anneal(config.temperature_start, config.temperature_end, anneal_progress)


def scores(
    params: Params,
    config: AutoSelectConfig,
    inputs: Inputs,
    text_gate: ArrayLike = 1.0,
) -> Float[Array, "b n"]:
    """Computes the score of each token from its encoding.

    Args:
        params: weights of the scorer.
        config: configuration of the scorer.
        inputs: image and question.
        text_gate: g_txt in [0, 1]; see `PolicyConfig.text_gate`.

    Returns:
        [b, n] scores, in at least float32; -1e9 in the padding.
    """
    encoded = policy.encode(params, config.shape, inputs, text_gate)
    head = params["head"]
    x = layer_norm(head["norm"], encoded.astype(score_dtype(encoded.dtype)))
    logits = (x @ head["kernel"].astype(x.dtype))[..., 0]
    return logits if inputs.image_mask is None else jnp.where(inputs.image_mask, logits, MASKED)


def add_gumbel(
    scores: Float[Array, "b n"], key: Array | None, temperature: float | int
) -> Float[Array, "b n"]:
    """Adds Gumbel noise to scores.

    The k best noisy scores of a row are a sample of k tokens without replacement.

    Args:
        scores: [b, n] unnormalized log-probabilities.
        key: PRNG key, one for all rows or one per row; None for a fixed key.
        temperature: sampling temperature; 0 returns the scores unchanged.

    Returns:
        [b, n] noisy scores.
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
    *,
    draw: float | int | None = None,
) -> GatedByScores:
    """Mixes all image tokens with noise: the better the score of a token, the less noise.

    Every row has a random budget, log-uniform over `config.random_budget`, so the scorer learns for
    all budgets. SoftTopK turns scores to gates in [0, 1] that sum to the budget.

    Args:
        params: weights of the scorer.
        config: configuration of the scorer.
        key: PRNG key; consumed (budgets, sampling and noise).
        inputs: image and question, never the answer.
        progress: progress of training.
        draw: sampling temperature; None for the configuration's.

    Returns:
        The gated tokens, and the scores, budgets and gates that they were computed from.
    """
    n = inputs.image.shape[1]
    budget_key, noise_key = jax.random.split(key)
    row_keys = jax.random.split(jax.random.fold_in(budget_key, 2), inputs.image.shape[0])
    noisy_scores = add_gumbel(
        scores(params, config, inputs, progress.text_gate),
        row_keys,
        config.draw if draw is None else draw,
    )
    fraction_range = budget_range(config.random_budget, config.budget_anneal, progress.share)
    budget = draw_budgets(budget_key, jnp.sum(inputs.real, axis=1), n, fraction_range)
    tau = temperature(config, progress.share)
    alpha = policy.soft_topk(noisy_scores, budget, tau, where=inputs.image_mask)
    tokens = gate_tokens(params, config.shape, noise_key, inputs, alpha)
    return GatedByScores(tokens, alpha, budget, noisy_scores)


def metrics(gated: GatedByScores, real: Bool[Array, "b n"]) -> dict[str, Float[Array, ""]]:
    """Returns scalars for monitoring the training of the scorer.

    Args:
        gated: result of `gate`.
        real: [b, n] True at real tokens.

    Returns:
        Scalars by name: the mean budget `k_mean`, and the metrics of `gate_metrics` if each row
        keeps the k tokens with the best scores.
    """
    rank = jnp.argsort(best_first(gated.scores), axis=1)
    is_top_k = real & (rank < gated.budget[:, None])
    mean_budget = jnp.mean(gated.budget.astype(jnp.float32))
    return {"k_mean": mean_budget, **gate_metrics(gated.alpha, is_top_k, real)}


def entropy(scores: Float[Array, "b n"]) -> Float[Array, ""]:
    """Returns the mean entropy of the softmax of the scores, in nats."""
    log_prob = jax.nn.log_softmax(scores, axis=-1)
    return -jnp.mean(jnp.sum(jnp.exp(log_prob) * log_prob, axis=-1))


def best_first(scores: Float[Array, "b n"]) -> Int[Array, "b n"]:
    """Returns the indices of the tokens by descending score; ties go to the lower index."""
    return jnp.argsort(-scores, axis=1, stable=True).astype(jnp.int32)


def order_by_marginal_relevance(
    scores: Float[Array, "b n"],
    unit: Float[Array, "b n d"],
    real: Bool[Array, "b n"],
    *,
    steps: int,
    diversity: float,
) -> Int[Array, "b t"]:
    """Orders tokens greedily by maximal marginal relevance.

    Each step chooses the token with the largest (1 - diversity) * score - diversity * c. c is the
    largest cosine between the token and any token that was chosen before.

    Args:
        scores: [b, n] score of each token; scaled to [0, 1] in each row.
        unit: [b, n, d] image tokens, normalized to length 1.
        real: [b, n] True at real tokens; at least one in each row.
        steps: number of tokens to order; static.
        diversity: weight of the cosine, in [0, 1].

    Returns:
        [b, t] int32 indices in order of choice; undefined after a row's last token.
    """
    scores = scores.astype(jnp.float32)
    min_score = jnp.min(scores, axis=1, initial=-MASKED, where=real, keepdims=True)
    spread = jnp.max(scores, axis=1, initial=MASKED, where=real, keepdims=True) - min_score
    relevance = jnp.where(real, (scores - min_score) / jnp.where(spread > 0, spread, 1), 0)
    # The distance of `farthest_first` is 1 - cosine. The constant does not change the order.
    return farthest_first(unit, real, steps, relevance, diversity)


@dataclasses.dataclass(frozen=True)
class AutoSelect(Policy):
    """Keeps the tokens with the best scores of a trained one-shot scorer.

    Attributes:
        config: configuration of the scorer.
        seed: seed of the sampled tokens.
        draw: sampling temperature, 0 for no sampling; None for the configuration's temperature.
        diversity: weight in [0, 1] of the largest cosine between a token and the tokens chosen
            before; 0 orders by score only.
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
        """Returns the specifications of StepPrune's encoder and denoiser, and a head for scores."""
        shared, d = policy_specs(self.config.shape), self.config.policy_width
        head = {
            # No biases: they would add one constant to all scores of a row, which SoftTopK ignores.
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
        """Computes the language-modeling loss on the gated tokens; see `Selector.loss`."""
        gated = gate(self.params, self.config, key, inputs, progress, draw=self.draw)
        loss = lm_loss_fn(gated.tokens).astype(score_dtype(gated.tokens.dtype))
        return loss, Aux({"lm_loss": loss} | metrics(gated, inputs.real))

    @implicit_promotion()
    def sample_subsets(
        self, inputs: Inputs, limits: Limits, keys: AnyKey, progress: Progress
    ) -> SampledSubsets:
        """Samples subsets without replacement, by the scores.

        The distribution over orders is Plackett-Luce: each token is sampled from the softmax of the
        scores of all tokens that are not chosen yet.

        Args:
            inputs: image and question.
            limits: the count of each row is `budget`, or else `max_tokens`, or else all tokens.
            keys: [g] PRNG keys, one per subset; consumed.
            progress: progress of training; `text_gate` is used.

        Returns:
            The subsets, with log-probabilities that are differentiable in the weights.
        """
        b, n = inputs.image.shape[:2]
        logits = scores(self.params, self.config, inputs, progress.text_gate)
        max_tokens = limits.max_tokens if limits.budget is None else limits.budget
        max_tokens = n if max_tokens is None else max_tokens
        count = jnp.minimum(max_tokens, jnp.sum(inputs.real, axis=1))

        def sample_subset(key):
            noisy_logits = add_gumbel(logits, jax.random.split(key, b), 1.0)
            order = best_first(jax.lax.stop_gradient(noisy_logits))
            ordered_logits = jnp.take_along_axis(logits, order, axis=1)
            # Each token is sampled from the softmax over itself and all later tokens.
            log_normaliser = cumlogsumexp(ordered_logits, reverse=True)
            token_log_prob = ordered_logits - log_normaliser
            is_kept = jnp.arange(n) < count[:, None]
            log_prob = jnp.sum(jnp.where(is_kept, token_log_prob, 0), axis=1)
            return first_picks(order, count, n), log_prob

        picks, log_prob = jax.vmap(sample_subset)(threefry(keys))
        return SampledSubsets(picks, log_prob, entropy(logits))

    @implicit_promotion()
    def warm_start(self, key: Array, inputs: Inputs, importance: Float[Array, "b n"]) -> WarmStart:
        """Computes the cross-entropy of the softmax of the scores to the importance of tokens.

        Args:
            key: not used.
            inputs: image and question.
            importance: [b, n] importance of each token, at least 0.

        Returns:
            The loss, and metrics; `covered` is of the eight tokens with the best scores.
        """
        del key
        target = normalize_importance(importance, inputs.real)
        logits = scores(self.params, self.config, inputs)
        top_tokens = best_first(logits)[:, :WARM_START_STEPS]
        return WarmStart(
            loss=-jnp.mean(jnp.sum(target * jax.nn.log_softmax(logits, axis=-1), axis=1)),
            covered=jnp.mean(jnp.sum(jnp.take_along_axis(target, top_tokens, axis=1), axis=1)),
            entropy=entropy(logits),
        )

    @implicit_promotion()
    def order(self, inputs: Inputs, steps: int, key: Array | None = None) -> Ranking:
        """Orders the tokens by score, or by marginal relevance if `diversity` is not 0.

        Args:
            inputs: image and question.
            steps: length of the order; static.
            key: PRNG key of the sampled tokens, one for all rows or one per row; None for a fixed
                key.

        Returns:
            The first `steps` tokens of the order, without stop margins.
        """
        temperature = self.config.draw if self.draw is None else self.draw
        noisy_scores = add_gumbel(scores(self.params, self.config, inputs), key, temperature)
        if not self.diversity:
            return Ranking(best_first(noisy_scores)[:, :steps])
        tokens = standardise(jnp.asarray(inputs.image), inputs.stats)
        order = order_by_marginal_relevance(
            noisy_scores,
            unit_vectors(tokens, inputs.real),
            inputs.real,
            steps=steps,
            diversity=self.diversity,
        )
        return Ranking(order)

    @property
    def encoder_config(self) -> PolicyConfig:
        """The StepPrune configuration with the same encoder and denoiser."""
        return self.config.shape

    def open_scores(
        self, inputs: Inputs, budget: int
    ) -> tuple[Float[Array, "b n"], Float[Array, ""]]:
        """Returns the scores of all tokens, and the mean entropy of their softmax."""
        logits = scores(self.params, self.config, inputs)
        return logits, entropy(logits)
