"""A trained selector as its users hold it: it prunes, and is trained, diagnosed, exported.

Its weights, configuration, statistics and stop belong together in one object, so that none of them
can be forgotten in front of a model of one's own.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, ClassVar, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.typing import ArrayLike
from jaxtyping import Array, Bool, Float

from stepprune_jax.extras import need
from stepprune_jax.policy import POINTER, DecoderFns, Inputs, Limits, Progress, Pruned, gather
from stepprune_jax.policy.base import AnyArray
from stepprune_jax.policy.buckets import bucket_ladder, choose_bucket
from stepprune_jax.policy.config import is_integer
from stepprune_jax.policy.gathering import run_gather
from stepprune_jax.policy.jax_settings import check_key
from stepprune_jax.policy.objective import ONE_LOSS, require_losses
from stepprune_jax.pruning.budget import EXACT, Budget
from stepprune_jax.selectors.base import Aux, Selector
from stepprune_jax.selectors.calibration import calibrate, count_stops, log_stops
from stepprune_jax.selectors.diagnosis import Diagnosis, measure, measure_stop, run_choose
from stepprune_jax.selectors.rloo import (
    RlooSettings,
    SubsetGain,
    rloo_loss,
    subset_gain,
    subset_rewards,
)
from stepprune_jax.user_input import UserError, expect, expect_type, local_path, nearest, require

AnyPolicy = TypeVar("AnyPolicy", bound="Policy")

# Options of `prune` and `select` that are fields of `Limits`.
_LIMITS = ("min_tokens", "max_tokens", "max_steps", "group")
# Platforms that `jax.export` lowers programs for.
_PLATFORMS = ("cpu", "cuda", "rocm", "tpu")


class Policy(Selector):
    """A trained selector: everything that is needed to use it in front of any model.

    It is a pytree whose leaves are weights, statistics, stop bias and the number of its budget:
    pass it to a jitted function as an argument. Its subclasses are the methods, such as
    `StepPrune`.
    """

    # Further options of `choose`, and of `loss`.
    choice_options: ClassVar[tuple[str, ...]] = ("key",)
    loss_options: ClassVar[tuple[str, ...]] = ()

    @jax.transfer_guard("allow")  # a function of the host, whatever a program forbids elsewhere
    def prune(
        self,
        image: Float[AnyArray, "b n d"],
        text: Float[AnyArray, "b l e"] | None = None,
        *,
        image_mask: Bool[AnyArray, "b n"] | None = None,
        text_mask: Bool[AnyArray, "b l"] | None = None,
        budget: ArrayLike | None = None,
        order: str = "raster",
        **options: Any,
    ) -> Pruned:
        """Prunes a batch of image tokens for its questions; see `stepprune_jax.prune`.

        It reads the counts on the host and so cannot be jitted; `select` can.

        Args:
            image: image tokens X, as returned by the tower.
            text: word embeddings of the question.
            image_mask: True at real image tokens.
            text_mask: True at real words.
            budget: exact count, an integer or one per row, instead of the policy's own budget.
            order: order of the kept tokens, as in `gather`.
            **options: key of the draws; min_tokens, max_tokens, max_steps and group, as in
                `Limits`; decoder, as in `stepprune_jax.choose`.

        Returns:
            The kept tokens in the smallest bucket that holds every row.

        Raises:
            TypeError: called inside a jitted function, or an unknown option.
            ValueError: a policy without weights, arrays of another shape or dtype, no text for a
                policy that reads it, or limits out of range.
        """
        self._check_options("prune", options, (*_LIMITS, *self.choice_options))
        inputs = self._read_inputs(image, text, image_mask, text_mask, options)
        if any(isinstance(leaf, Tracer) for leaf in jax.tree.leaves((self, inputs))):
            raise TypeError(
                "prune reads the counts on the host and cannot be jitted: jit "
                "policy.select(image, text, capacity=...)"
            )
        limits = self.as_arrays(inputs, self._limits(inputs, budget, options))
        picks = run_choose(self.program(), inputs, limits, **options)
        bucket = choose_bucket(picks.count, bucket_ladder(picks.action.shape[1]))
        return run_gather(picks, inputs.image, bucket, order=order)

    def select(
        self,
        image: Float[AnyArray, "b n d"],
        text: Float[AnyArray, "b l e"] | None = None,
        *,
        capacity: int,
        image_mask: Bool[AnyArray, "b n"] | None = None,
        text_mask: Bool[AnyArray, "b l"] | None = None,
        order: str = "raster",
        **options: Any,
    ) -> Pruned:
        """Prunes with static shapes, for use within a jitted function.

        For example::

            select = jax.jit(lambda policy, image, text: policy.select(image, text, capacity=64))
            pruned = select(policy.with_budget("mean:48"), image, text)

        Args:
            image: image tokens X.
            text: word embeddings of the question.
            capacity: size of the result; rows that keep more lose their last choices.
            image_mask: True at real image tokens.
            text_mask: True at real words.
            order: order of the kept tokens, as in `gather`.
            **options: budget, and the options of `prune`.

        Returns:
            The kept tokens, padded to `capacity`.

        Raises:
            TypeError: an unknown option.
            ValueError: as `prune`, or a capacity that is no integer from 1 to n.
        """
        self._check_options("select", options, ("budget", *_LIMITS, *self.choice_options))
        inputs = self._read_inputs(image, text, image_mask, text_mask, options)
        n = inputs.image.shape[1]
        fits = is_integer(capacity) and 1 <= capacity <= n
        expect("capacity", capacity, fits, f"an integer from 1 to {n}, the tokens of an image")
        limits = self._limits(inputs, options.pop("budget", None), options)
        picks = self.choose(inputs, limits, **options)
        # Outside a jitted function, too, rows that keep more lose their last choices.
        picks = picks._replace(count=jnp.minimum(picks.count, capacity))
        return gather(picks, image, capacity, order=order)

    def export(
        self,
        path: str | Path,
        *,
        num_tokens: int,
        num_words: int,
        capacity: int | None = None,
        batch: int | str = "b",
        platforms: Sequence[str] = ("cpu", "cuda", "tpu"),
        **options: Any,
    ) -> Path:
        """Writes `select` and the weights as one program of StableHLO, for `jax.export`.

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
            **options: those of `select`.

        Returns:
            The path.

        Raises:
            MissingPackageError: flatbuffers is not installed.
            ValueError: as `select`.
        """
        from jax import export  # needs another package in old versions of jax

        need("flatbuffers", "Policy.export writes a program")
        for name, value, least in (("num_tokens", num_tokens, 1), ("num_words", num_words, 0)):
            fits = is_integer(value) and value >= least
            expect(name, value, fits, f"an integer from {least}")
        named = not isinstance(platforms, str) and {*platforms} <= {*_PLATFORMS}
        expect("platforms", platforms, named, f"a sequence of {', '.join(_PLATFORMS)}")
        self.check_weights()
        most = options.get("max_steps") or self.longest(num_tokens)
        own = self.budget.count(num_tokens) if self.budget.kind in EXACT else None
        size = capacity or options.get("budget") or own or most

        def program(image, text=None, text_mask=None):
            kept = self.select(image, text, capacity=size, text_mask=text_mask, **options)
            return kept._asdict()

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
        **options: Any,
    ) -> tuple[Float[Array, ""], Aux]:
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
            **options: progress, the schedules of the training so far; length_weight and decoder, as
                in `stepprune_jax.train_loss`.

        Returns:
            The loss, and scalars that show whether it learns.

        Raises:
            TypeError: an unknown option.
            ValueError: a language-modelling loss that is no scalar, or a key, a function or a
                progress of another type; and as `prune`.
        """
        self._check_options("train_loss", options, ("progress", *self.loss_options))
        inputs = self._read_inputs(image, text, image_mask, text_mask, options)
        progress = options.pop("progress", Progress())
        expect_type("progress", progress, Progress, "Progress(share, text_gate)")
        _expect_function("lm_loss_fn", lm_loss_fn)

        def scalar_loss(tokens):
            loss = lm_loss_fn(tokens)
            require_losses("lm_loss_fn", loss, (), ONE_LOSS)
            return jnp.asarray(loss)

        return self.loss(check_key(key), inputs, scalar_loss, progress, **options)

    def rloo_loss(
        self,
        key: Array,
        image: Float[AnyArray, "b n d"],
        text: Float[AnyArray, "b l e"] | None,
        answer_loss_fn: Callable[[Pruned], Float[Array, "b g"]],
        settings: RlooSettings | None = None,
        *,
        image_mask: Bool[AnyArray, "b n"] | None = None,
        text_mask: Bool[AnyArray, "b l"] | None = None,
    ) -> tuple[Float[Array, ""], Aux]:
        """Computes the objective of sampled sets with the policy's own statistics.

        Nothing is differentiated but the policy, so any program can answer, also one without
        gradients. From drawn weights it has to be right now and then with a few random tokens.

        Args:
            key: PRNG key; consumed.
            image: image tokens X.
            text: word embeddings of the question, never of the answer.
            answer_loss_fn: maps sets of kept tokens, whose leaves are [b, g, ...], to the mean loss
                of the answer's tokens with each.
            settings: number and sizes of the sets; by default 8, as in `RlooSettings`.
            image_mask: True at real image tokens.
            text_mask: True at real words.

        Returns:
            As `train_loss`.

        Raises:
            ValueError: a method that draws no sets, or losses of another shape than [b, g].
        """
        inputs = self._read_inputs(image, text, image_mask, text_mask)
        settings = self._read_settings(settings)
        _expect_function("answer_loss_fn", answer_loss_fn)
        key = check_key(key)
        return rloo_loss(self, settings, key, inputs, answer_loss_fn, Progress())

    def measure_subset_gain(
        self,
        key: Array,
        image: Float[AnyArray, "b n d"],
        text: Float[AnyArray, "b l e"] | None,
        answer_loss_fn: Callable[[Pruned], Float[Array, "b g"]],
        settings: RlooSettings | None = None,
        *,
        image_mask: Bool[AnyArray, "b n"] | None = None,
        text_mask: Bool[AnyArray, "b l"] | None = None,
    ) -> SubsetGain:
        """Tells whether sampled sets would teach this policy, or have to wait for the gate.

        Of drawn weights, the sets are random ones. The arguments are those of
        `rloo_loss`, on a few hundred training questions; `answer_loss_fn` is also called
        with one set of all tokens, [b, 1, n].

        Returns:
            What sets gain; `suffices` decides, and `print` shows it.

        Raises:
            ValueError: as `rloo_loss`.
        """
        inputs = self._read_inputs(image, text, image_mask, text_mask)
        settings = self._read_settings(settings)
        _expect_function("answer_loss_fn", answer_loss_fn)
        rewards = subset_rewards(self, settings, check_key(key), inputs, answer_loss_fn)
        return subset_gain([rewards])

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
        recipe: str = "",
    ) -> list[Diagnosis]:
        """Diagnoses learning: compares the loss under its tokens with four baselines.

        A falling loss says little: it falls, too, where all that is learned is which tokens are
        worth seeing in any image. What counts is the loss with the kept tokens alone, beside that
        of as many random ones, and of those it keeps for another question of the batch. A learned
        stop is told apart: what it keeps by itself, and whether it sits at a bound.

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
            recipe: how it was trained, "gate" or "sets", to find out whether the other would be
                better.

        Returns:
            A `Diagnosis` for each budget; `print` shows it.

        Raises:
            ValueError: as `prune`, losses that are not one for each row, or an unknown recipe.
        """
        expect("recipe", recipe, recipe in ("", "gate", "sets"), "gate or sets, or nothing")
        _expect_function("loss_fn", loss_fn)
        inputs = self._read_inputs(image, text, image_mask, text_mask)
        is_list = isinstance(budgets, Sequence) and len(budgets) > 0
        fits = is_list and all(map(is_integer, budgets))
        expect("budgets", budgets, fits, "a list of numbers of tokens, such as [16, 64]")
        key = jax.random.key(0) if key is None else check_key(key)
        stops = measure_stop(self, inputs) if self.has_stop else None
        return [
            measure(self, inputs, loss_fn, budget, jax.random.fold_in(key, i), recipe, stops)
            for i, budget in enumerate(budgets)
        ]

    @jax.transfer_guard("allow")
    def calibrate(
        self: AnyPolicy,
        batches: Iterable[tuple[AnyArray, AnyArray | None]],
        decoder: DecoderFns | None = None,
    ) -> AnyPolicy:
        """Measures the mean counts of stop biases.

        Also logs what the learned stop keeps by itself, with a warning where it sits at a bound.

        Args:
            batches: image tokens [b, n, d] and word embeddings [b, l, e] of validation questions,
                without padding. A few hundred questions do; a program is compiled for each shape.
            decoder: functions of a decoder of your own, as in `prune`.

        Returns:
            The calibrated policy.

        Raises:
            ValueError: it has no stop, or there are no batches.
        """
        require(self.has_stop, f"{self.name} has no learned stop to calibrate")
        options = {} if decoder is None else {"decoder": decoder}
        self._check_options("calibrate", options, ("decoder",))
        rolled, parts = self.program(), []
        for number, batch in enumerate(batches):
            pair = isinstance(batch, tuple | list) and len(batch) == 2
            shown = f"a pair (image, text), got {type(batch).__name__}"
            require(pair, f"batches[{number}]: expected {shown}")
            inputs = self._read_inputs(*batch, None, None, options)
            parts.append((_margins(rolled, inputs, **options), jnp.shape(inputs.image)))
        require(bool(parts), "batches is empty, expected at least one")
        steps = max(margin.shape[1] for margin, _ in parts)
        rows = [
            np.pad(np.asarray(m), ((0, 0), (0, steps - m.shape[1])), constant_values=np.inf)
            for m, _ in parts
        ]
        sizes = np.concatenate([np.full(b, n) for _, (b, n, _) in parts])
        margins = np.concatenate(rows)
        log_stops(count_stops(margins, sizes, self.min_tokens, float(self.stop_bias)))
        return self.replace(calibration=calibrate(margins, sizes, self.min_tokens))

    def _read_inputs(
        self,
        image: Any,
        text: Any,
        image_mask: Any,
        text_mask: Any,
        options: Mapping[str, Any] = MappingProxyType({}),
    ) -> Inputs:
        """Returns the inputs of a call, once policy and arrays are checked; raises as `prune`."""
        decoder = options.get("decoder", POINTER)
        self.check_weights(without="" if decoder is POINTER else "decoder")
        width = self.config.text_width if self.reads_text else 0
        if width == 0:
            text, text_mask = None, None
        elif text is None:
            raise UserError(
                f"text is None, expected word embeddings (b, l, {width}), as this policy reads the "
                f"question; for no question give zeros of shape (b, 1, {width}) and a text_mask of "
                "False"
            )
        # The statistics are leaves of a policy: an optimizer of all leaves would change them.
        stats = jax.lax.stop_gradient(self.stats)
        inputs = Inputs(image, text, image_mask, text_mask, stats)
        inputs.check(self.config.feature_width, width)
        return inputs

    def _check_options(self, name: str, options: Mapping[str, Any], known: Sequence[str]) -> None:
        """Raises a TypeError for an unknown option of a method, a ValueError for a bad value."""
        for option in options.keys() - {*known}:
            function = f"{type(self).__name__}.{name}"
            listed = f"its options: {', '.join(known) or 'none'}.{nearest(option, known)}"
            raise TypeError(f"{function} has no option {option!r}; {listed}")
        if "decoder" in options:
            expect_type("decoder", options["decoder"], DecoderFns, "DecoderFns(init, step)")
        if options.get("key") is not None:
            check_key(options["key"])

    def _read_settings(self, settings: RlooSettings | None) -> RlooSettings:
        """Returns settings with sets to draw, by default 8; raises as `rloo_loss`."""
        draws = f"{self.name} draws no sets of tokens: train it with train_loss"
        require(self.samples_subsets, draws)
        settings = RlooSettings(samples=8) if settings is None else settings
        expect_type("settings", settings, RlooSettings, "PolicyGradientSettings")
        require(settings.samples > 0, "settings.samples is 0, expected an integer from 2")
        return settings

    def _limits(self, inputs: Inputs, budget: Any, options: dict[str, Any]) -> Limits:
        """Takes the fields of `Limits` out of options; without a budget its own holds."""
        if budget is None:
            self.require_kind(self.budget)
        elif isinstance(budget, str | float | Budget):
            shown = str(budget) if isinstance(budget, Budget) else repr(budget)
            message = f"budget is {shown}, expected a count, or one for each row; a share, a mean "
            raise UserError(message + "or the learned stop is set by policy.with_budget")
        if budget is None and self.budget.kind == "count":
            budget = self.budget.value
        if budget is None and self.budget.kind == "rate":
            sizes = jnp.sum(inputs.real, axis=1, dtype=jnp.int32)
            budget = self.budget.counts(sizes, inputs.image.shape[1])
        return Limits(budget, **{name: options.pop(name, None) for name in _LIMITS})


def _expect_function(name: str, value: Any) -> None:
    """Raises a UserError that names an argument unless it can be called."""
    require(callable(value), f"{name} is a {type(value).__name__}, expected a function")


@jax.jit
def _margins(policy: Policy, inputs: Inputs, **options: Any) -> Float[Array, "b t"] | None:
    """Computes stop margins of rollouts that do not stop."""
    return policy.order(inputs, policy.longest(inputs.image.shape[1]), **options).margin
