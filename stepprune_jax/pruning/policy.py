"""A trained policy as one object: weights, configuration, feature statistics, stop.

It prunes by itself, so that no part that belongs to its weights can be forgotten.
"""

import dataclasses
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike
from jaxtyping import Array, Bool, Float

from stepprune_jax import policy as functions
from stepprune_jax.policy import DecoderFns, FeatureStats, Inputs, Limits, Progress, Pruned
from stepprune_jax.policy.base import AnyArray
from stepprune_jax.pruning.calibration import Calibration, calibrate
from stepprune_jax.pruning.diagnosis import Diagnosis, measure
from stepprune_jax.pruning.policy_gradient import PolicyGradientSettings, policy_gradient_loss
from stepprune_jax.pruning.registry import method_of
from stepprune_jax.pruning.trained import Learned, TrainedConfig, TrainedMethod
from stepprune_jax.user_input import check, local_path

CALIBRATE = "python -m stepprune_jax.calibrate"


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Policy:
    """A policy with everything needed to use it.

    It is a pytree whose leaves are weights, statistics and stop bias: pass it to a jitted function
    as an argument.

    Attributes:
        params: the weights.
        config: shapes and readings; its type identifies the method.
        stats: statistics of the features it was trained with; None, which must be explicit, if the
            features were not standardised.
        stop_bias: default number added to the stop logits.
        calibration: stop biases of mean counts; None if not measured.
    """

    params: Any
    config: TrainedConfig = dataclasses.field(metadata={"static": True})
    stats: FeatureStats | None
    stop_bias: Any = 0.0
    calibration: Calibration | None = dataclasses.field(default=None, metadata={"static": True})

    @classmethod
    def init(cls, key: Array, config: TrainedConfig, stats: FeatureStats | None) -> "Policy":
        """Draws the weights of a policy to be trained.

        Args:
            key: PRNG key; consumed.
            config: shapes and readings: a `PolicyConfig` or an `AutoSelectConfig`.
            stats: statistics of the features, gathered with `update_stats`; None to skip
                standardisation.
        """
        return cls(method_of(config).init(key), config, stats)

    @property
    def pruner(self) -> Learned:
        """Its method, with its configuration."""
        return method_of(self.config)

    @property
    def ranker(self) -> TrainedMethod:
        """Its method, if it prunes in front of a language model.

        Raises:
            ValueError: it prunes between the layers of one.
        """
        pruner = self.pruner
        if not isinstance(pruner, TrainedMethod):
            raise ValueError(f"{pruner.name} prunes inside a language model: use `make_method`")
        return pruner

    @property
    def method(self) -> str:
        """Name of its method, of `PRUNERS`, such as "stepprune"."""
        return self.pruner.name

    @property
    def has_stop(self) -> bool:
        """Whether it has a learned stop."""
        return self.pruner.has_stop

    def replace(self, **changes: Any) -> "Policy":
        """Returns a copy with some fields replaced."""
        return dataclasses.replace(self, **changes)

    def bias_at(self, mean_budget: float | int) -> float:
        """Returns the stop bias at which it keeps `mean_budget` tokens on average.

        Args:
            mean_budget: tokens to keep per image, on average over questions like those of the
                calibration.

        Returns:
            The bias.

        Raises:
            ValueError: it has no stop or no calibration, or the mean is out of its range.

        Warns:
            UserWarning: as `Calibration.bias_at`.
        """
        check((self.has_stop, f"{self.method} has no learned stop, and so no mean budget"))
        if self.calibration is None:
            raise ValueError(
                "the policy has no calibration, which a mean budget (--mean_budget) needs: create "
                f"one with {CALIBRATE}, or give a stop bias (--stop_bias)"
            )
        return self.calibration.bias_at(mean_budget)

    def prune(
        self,
        image: Float[AnyArray, "b n d"],
        text: Float[AnyArray, "b l e"] | None = None,
        *,
        budget: ArrayLike | None = None,
        mean_budget: float | int | None = None,
        stop_bias: ArrayLike | None = None,
        **arguments: Any,
    ) -> Pruned:
        """Prunes a batch of image tokens for its questions; see `stepprune_jax.prune`.

        It reads the counts on the host and so cannot be jitted; the result of `select_fn` can.

        Args:
            image: image tokens X, as returned by the tower.
            text: word embeddings of the question.
            budget: exact count, an integer or one per row.
            mean_budget: mean count, by the policy's calibration.
            stop_bias: replaces the policy's own. Without any of the three it stops by itself.
            **arguments: image_mask and text_mask, as in `Inputs`; min_tokens, max_tokens, max_steps
                and group, as in `Limits`; key, order and decoder, as in `prune`.

        Returns:
            The kept tokens in the smallest bucket that holds every row.

        Raises:
            ValueError: as `prune` and `bias_at`, or more than one of the three is given.
        """
        bias = self._bias(budget, mean_budget, stop_bias)
        masks = {name: arguments.pop(name, None) for name in ("image_mask", "text_mask")}
        inputs, limits = Inputs(image, text, **masks, stats=self.stats), _limits(budget, arguments)
        return self.ranker.prune(self.params, inputs, limits, stop_bias=bias, **arguments)

    def select_fn(
        self,
        capacity: int,
        *,
        budget: int | None = None,
        mean_budget: float | int | None = None,
        order: str = "raster",
        **arguments: Any,
    ) -> Callable[..., Pruned]:
        """Returns a pure pruning function with static shapes, to be jitted or called from jit.

        For example::

            select = jax.jit(policy.select_fn(capacity=64, mean_budget=48))
            pruned = select(policy, image, text)

        Args:
            capacity: size of the result; rows that keep more lose their last choices.
            budget: exact count of each row.
            mean_budget: mean count, by the policy's calibration. Without either the policy stops by
                itself.
            order: order of the kept tokens, as in `gather`.
            **arguments: min_tokens, max_tokens, max_steps and group, as in `Limits`; decoder, as in
                `choose`.

        Returns:
            A function of (policy, image, text), and of image_mask, text_mask and key by name, that
            returns a `Pruned`. The policy's weights and statistics are arguments, not constants.
            It raises a ValueError if the first argument is not a policy.

        Raises:
            ValueError: as `bias_at`.
        """
        bias = self._bias(budget, mean_budget, None)
        own = budget is None and mean_budget is None
        limits = _limits(budget, arguments)

        def select(
            policy: Policy,
            image: Float[Array, "b n d"],
            text: Float[Array, "b l e"] | None = None,
            *,
            image_mask: Bool[Array, "b n"] | None = None,
            text_mask: Bool[Array, "b l"] | None = None,
            key: Array | None = None,
        ) -> Pruned:
            if not isinstance(policy, Policy):
                kind = type(policy).__name__
                raise ValueError(
                    f"select: policy is of type {kind}, expected the Policy: the function that "
                    "select_fn returned is called as select(policy, image, text)"
                )
            inputs = Inputs(image, text, image_mask, text_mask, policy.stats)
            stop = policy.stop_bias if own else bias
            given = (policy.params, inputs, limits, stop, key)
            picks = policy.ranker.choose(*given, **arguments)
            # Outside a jitted function, too, rows that keep more lose their last choices.
            picks = picks._replace(count=jnp.minimum(picks.count, capacity))
            return functions.gather(picks, image, capacity, order=order)

        return select

    def export(
        self,
        path: str | Path,
        *,
        num_tokens: int,
        num_words: int,
        capacity: int | None = None,
        batch: int | str = "b",
        platforms: Sequence[str] = ("cpu", "cuda", "tpu"),
        **how: Any,
    ) -> Path:
        """Writes `select_fn` and the weights as one program of StableHLO, for `jax.export`.

        The program runs without this package. It maps float32 image tokens [b, n, d], word
        embeddings [b, l, e] and a boolean mask of real words [b, l] to a dict of "index" [b, k],
        "tokens" [b, k, d], "valid" [b, k] and "count" [b], as in `Pruned`; a policy that sees no
        text maps the image tokens alone.

        Args:
            path: the file; parent folders are created.
            num_tokens: n.
            num_words: l.
            capacity: k; by default the budget, or the most tokens that the policy keeps.
            batch: b, a number, or a name for any.
            platforms: what the program is lowered for.
            **how: budget or mean_budget, order and the rest of `select_fn`.

        Returns:
            The path.

        Raises:
            ValueError: as `select_fn`.
        """
        from jax import export  # which in old versions of jax needs another package

        most = how.get("max_steps") or self.pruner.most(num_tokens)
        size = capacity or how.get("budget") or most
        select = self.select_fn(size, **how)

        def program(image, text=None, text_mask=None):
            return select(self, image, text, text_mask=text_mask)._asdict()

        (b,) = export.symbolic_shape(str(batch))
        wide, e = self.config.feature_width, self.config.text_width
        inputs = [jax.ShapeDtypeStruct((b, num_tokens, wide), jnp.float32)]
        if e:
            inputs.append(jax.ShapeDtypeStruct((b, num_words, e), jnp.float32))
            inputs.append(jax.ShapeDtypeStruct((b, num_words), jnp.bool_))
        exported = export.export(jax.jit(program), platforms=tuple(platforms))(*inputs)
        path = local_path(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(exported.serialize())
        return path

    def train_loss(
        self,
        key: Array,
        image: Float[AnyArray, "b n d"],
        text: Float[AnyArray, "b l e"] | None,
        lm_loss_fn: Callable[[Float[Array, "b n d"]], Float[Array, ""]],
        *,
        image_mask: Bool[AnyArray, "b n"] | None = None,
        text_mask: Bool[AnyArray, "b l"] | None = None,
        progress: Progress = Progress(),
        **keywords: Any,
    ) -> tuple[Float[Array, ""], Any]:
        """Computes the training objective with the policy's own statistics; see `train_loss`.

        Differentiate with respect to the weights alone:
        `jax.grad(lambda params: policy.replace(params=params).train_loss(...), has_aux=True)`.

        Args:
            key: PRNG key; consumed.
            image: image tokens X.
            text: word embeddings of the question, never of the answer.
            lm_loss_fn: maps the gated tokens to the mean language-modelling loss.
            image_mask: True at real image tokens.
            text_mask: True at real words.
            progress: schedules of the training so far.
            **keywords: length_weight and decoder, as in `train_loss`.

        Returns:
            The loss, and (scalars that show whether it learns by name, the running mean of K).
        """
        inputs = Inputs(image, text, image_mask, text_mask, self.stats)
        given = (self.params, key, inputs, lm_loss_fn, progress)
        return self.ranker.train_loss(*given, **keywords)

    def policy_gradient_loss(
        self,
        key: Array,
        image: Float[AnyArray, "b n d"],
        text: Float[AnyArray, "b l e"] | None,
        answer_loss_fn: Callable[[Pruned], Float[Array, "b g"]],
        settings: PolicyGradientSettings | None = None,
        *,
        image_mask: Bool[AnyArray, "b n"] | None = None,
        text_mask: Bool[AnyArray, "b l"] | None = None,
    ) -> tuple[Float[Array, ""], Any]:
        """Computes the objective of sampled sets with the policy's own statistics.

        Nothing is differentiated but the policy, so any program can answer, also one without
        gradients. From drawn weights it has to be right now and then with a few random tokens.

        Args:
            key: PRNG key; consumed.
            image: image tokens X.
            text: word embeddings of the question, never of the answer.
            answer_loss_fn: maps sets of kept tokens, whose leaves are [b, g, ...], to the mean loss
                of the answer's tokens with each.
            settings: number and sizes of the sets; by default 8, as in `PolicyGradientSettings`.
            image_mask: True at real image tokens.
            text_mask: True at real words.

        Returns:
            As `train_loss`.

        Raises:
            ValueError: a method that draws no sets.
        """
        inputs = Inputs(image, text, image_mask, text_mask, self.stats)
        settings = settings or PolicyGradientSettings(samples=8)
        check((settings.samples > 0, "settings.samples is 0, expected an integer from 2"))
        given = (self.params, key, inputs, answer_loss_fn, Progress())
        return policy_gradient_loss(self.ranker, settings, *given)

    def diagnose(
        self,
        loss_fn: Callable[[Pruned], Any],
        image: Float[AnyArray, "b n d"],
        text: Float[AnyArray, "b l e"] | None,
        budgets: Sequence[int],
        *,
        image_mask: Bool[AnyArray, "b n"] | None = None,
        text_mask: Bool[AnyArray, "b l"] | None = None,
        key: Array | None = None,
    ) -> list[Diagnosis]:
        """Tells whether it learns: the losses of its tokens beside those of others, and in words.

        A falling loss says little: it falls, too, where all that is learned is which tokens are
        worth seeing in any image. What counts is the loss with the kept tokens alone, beside that
        of as many random ones, and of those it keeps for another question of the batch.

        Args:
            loss_fn: maps kept tokens to the loss of each row, [b], or to (loss, whether the answer
                is right). Its argument has rows in the order of `image`, and places that are not
                valid; with no token at all, none is.
            image: image tokens X of questions that were not used for training; some hundred rows
                tell one percent from chance.
            text: word embeddings of the questions; each row's neighbour asks the other question.
            budgets: numbers of tokens.
            image_mask: True at real image tokens.
            text_mask: True at real words.
            key: PRNG key of the random tokens; consumed.

        Returns:
            A `Diagnosis` for each budget; `print` shows it.

        Raises:
            ValueError: as `prune`, or losses that are not one for each row.
        """
        inputs = Inputs(image, text, image_mask, text_mask, self.stats)
        key = jax.random.key(0) if key is None else key
        return [
            measure(self.ranker, self.params, inputs, loss_fn, budget, jax.random.fold_in(key, i))
            for i, budget in enumerate(budgets)
        ]

    def calibrate(
        self,
        batches: Iterable[tuple[AnyArray, AnyArray | None]],
        decoder: DecoderFns | None = None,
    ) -> "Policy":
        """Measures the mean counts of stop biases.

        Args:
            batches: image tokens [b, n, d] and word embeddings [b, l, e] of validation questions,
                without padding. A few hundred questions do; a program is compiled for each shape.
            decoder: functions of a decoder of your own, as in `prune`.

        Returns:
            The calibrated policy.

        Raises:
            ValueError: it has no stop, or there are no batches.
        """
        check((self.has_stop, f"{self.method} has no learned stop to calibrate"))
        options = {} if decoder is None else {"decoder": decoder}
        parts = [
            (_margins(self, Inputs(image, text, stats=self.stats), **options), jnp.shape(image)[:2])
            for image, text in batches
        ]
        check((bool(parts), "batches is empty, expected at least one"))
        steps = max(margin.shape[1] for margin, _ in parts)
        rows = [
            np.pad(np.asarray(m), ((0, 0), (0, steps - m.shape[1])), constant_values=np.inf)
            for m, _ in parts
        ]
        sizes = np.concatenate([np.full(rows, tokens) for _, (rows, tokens) in parts])
        table = calibrate(np.concatenate(rows), sizes, self.ranker.least)
        return self.replace(calibration=table)

    def _bias(
        self, budget: Any, mean_budget: float | int | None, stop_bias: ArrayLike | None
    ) -> ArrayLike:
        """Returns the requested stop bias."""
        given = {"budget": budget, "mean_budget": mean_budget, "stop_bias": stop_bias}
        named = [name for name, value in given.items() if value is not None]
        check((len(named) < 2, f"{' and '.join(named)} are given, expected one of them"))
        if mean_budget is not None:
            return self.bias_at(mean_budget)
        return self.stop_bias if stop_bias is None else stop_bias


def _limits(budget: Any, arguments: dict[str, Any]) -> Limits:
    """Takes the fields of `Limits` out of keyword arguments."""
    names = ("min_tokens", "max_tokens", "max_steps", "group")
    return Limits(budget, **{name: arguments.pop(name, None) for name in names})


@jax.jit
def _margins(policy: Policy, inputs: Inputs, **options: Any) -> Float[Array, "b t"] | None:
    """Computes stop margins of rollouts that do not stop."""
    method, n = policy.ranker, inputs.image.shape[1]
    return method.order(policy.params, inputs, method.most(n), **options).margin
