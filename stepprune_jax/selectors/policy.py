"""A trained selector in front of any model: pruning, training, diagnosis, calibration, export.

A `Policy` holds weights, configuration, statistics and stop in one object, so that callers cannot
combine parts that do not belong together.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, TypedDict, TypeVar, Unpack

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
from stepprune_jax.user_input import UserError, expect, expect_type, local_path, nearest

AnyPolicy = TypeVar("AnyPolicy", bound="Policy")

# Short names of types, for the signatures that `help` shows.
ImageTokens = Float[AnyArray, "b n d"]
TextEmbeddings = Float[AnyArray, "b l e"]
TokenScores = Float[AnyArray, "b n"]
Loss = Float[Array, ""]
LossFn = Callable[[Pruned], Any]
AnswerLossFn = Callable[[Pruned], Float[Array, "b g"]]
LmLossFn = Callable[[Float[Array, "b n d"]], Float[Array, ""]]
Batch = tuple[AnyArray, AnyArray | None]  # image tokens and word embeddings

# Options of `prune` and `select` that are fields of `Limits`.
_LIMITS = ("min_tokens", "max_tokens", "max_steps", "group")
# Platforms that `jax.export` lowers programs for.
_PLATFORMS = ("cpu", "cuda", "rocm", "tpu")


class Masks(TypedDict, total=False):
    """Keyword arguments that mark the padding of a batch.

    Attributes:
        image_mask: [b, n] True at real image tokens; without it, all tokens are real.
        text_mask: [b, l] True at real words; without it, all words are real.
    """

    image_mask: Bool[AnyArray, "b n"] | None
    text_mask: Bool[AnyArray, "b l"] | None


class SelectOptions(Masks, total=False):
    """Keyword arguments of `Policy.prune`, `select` and `export`.

    A method without a learned stop has only `budget`, `key` and the masks.

    Attributes:
        budget: exact count, an integer or one per row; without it, the policy's budget applies.
        min_tokens: number of tokens before the stop is available; see `Limits`.
        max_tokens: number of tokens after which a row is stopped; see `Limits`.
        max_steps: T_max; see `Limits`.
        group: number of tokens per pointer distribution; see `Limits`.
        key: PRNG key of the sampled tokens, one for all rows or one per row; without it, a fixed
            key.
        decoder: functions of a custom decoder; see `DecoderFns`.
    """

    budget: ArrayLike | None
    min_tokens: ArrayLike | None
    max_tokens: ArrayLike | None
    max_steps: int | None
    group: int | None
    key: Array | None
    decoder: DecoderFns


class LossOptions(Masks, total=False):
    """Keyword arguments of `Policy.train_loss`.

    Attributes:
        progress: progress of training; without it, the end of training.
        length_weight: lambda of the length penalty, for a method with a learned stop; without it,
            the configuration's.
        decoder: functions of a custom decoder; see `DecoderFns`.
    """

    progress: Progress
    length_weight: ArrayLike | None
    decoder: DecoderFns


class Policy(Selector):
    """A trained selector with the functions that users call in front of any model.

    With `StepPrune` as the policy, and `import stepprune_jax as sp`::

        policy = sp.StepPrune.init(key, config, stats)  # randomly initialized weights
        pruned = policy.prune(image, text)  # the kept tokens; inside jit: policy.select
        loss, aux = policy.train_loss(key, image, text, lm_loss_fn)  # or policy.rloo_loss
        sp.save_policy(policy, "policy.safetensors")
        policy = sp.load_policy("policy.safetensors")

    Further functions: `with_budget`, `diagnose`, `calibrate`, `measure_subset_gain`,
    `warm_start_loss`, `export`, and `replace`, which returns a copy with other fields.

    A policy is a pytree whose leaves are weights, statistics, stop bias and the number of its
    budget: pass it to a jitted function as an argument. Its subclasses are the methods, such as
    `StepPrune`.

    The arguments that most functions share are:

    * image: [b, n, d] image tokens X, as returned by the vision tower.
    * text: [b, l, e] word embeddings of the question, never of the answer; None for a method that
      reads no text.
    * masks: `image_mask` [b, n] and `text_mask` [b, l], True at real tokens and words.

    All functions raise a ValueError for a policy without weights, an argument of another type, an
    array of another shape or dtype, or missing text, and a TypeError for an unknown option.

    Attributes:
        choice_options: names of the options of `choose`, in addition to `Limits`.
        loss_options: names of the options of `loss`.
    """

    choice_options: ClassVar[tuple[str, ...]] = ("key",)
    loss_options: ClassVar[tuple[str, ...]] = ()

    # Reading the counts on the host is the purpose of `prune`, so it overrides the transfer guard.
    @jax.transfer_guard("allow")
    def prune(
        self,
        image: ImageTokens,
        text: TextEmbeddings | None = None,
        *,
        order: str = "raster",
        **options: Unpack[SelectOptions],
    ) -> Pruned:
        """Selects the image tokens that matter for each question; see `stepprune_jax.prune`.

        The function reads the number of kept tokens on the host, so it cannot be jitted. `select`
        can be jitted.

        Args:
            image: [b, n, d] image tokens.
            text: [b, l, e] word embeddings of the question.
            order: order of the kept tokens, as in `gather`.
            **options: see `SelectOptions`.

        Returns:
            The kept tokens, padded to the smallest size of `bucket_ladder` that holds every row.

        Raises:
            TypeError: the function is called inside a jitted function, or an option is unknown.
            ValueError: limits are out of range, or an error of all functions of `Policy`.
        """
        inputs, limits, choice_options = self._read_options("prune", image, text, options)
        if any(isinstance(leaf, Tracer) for leaf in jax.tree.leaves((self, inputs))):
            raise TypeError(
                "prune reads the counts on the host and cannot be jitted: jit "
                "policy.select(image, text, capacity=...)"
            )
        limits = self.as_arrays(inputs, limits)
        picks = run_choose(self.program(), inputs, limits, **choice_options)
        bucket = choose_bucket(picks.count, bucket_ladder(picks.action.shape[1]))
        return run_gather(picks, inputs.image, bucket, order=order)

    def select(
        self,
        image: ImageTokens,
        text: TextEmbeddings | None = None,
        *,
        capacity: int,
        order: str = "raster",
        **options: Unpack[SelectOptions],
    ) -> Pruned:
        """Selects image tokens with static shapes, for use within a jitted function.

        For example::

            select = jax.jit(lambda policy, image, text: policy.select(image, text, capacity=64))
            pruned = select(policy.with_budget("mean:48"), image, text)

        Args:
            image: [b, n, d] image tokens.
            text: [b, l, e] word embeddings of the question.
            capacity: k, the padded size. If a row keeps more tokens, only its first k choices
                remain.
            order: order of the kept tokens, as in `gather`.
            **options: see `SelectOptions`.

        Returns:
            The kept tokens, padded to `capacity`.

        Raises:
            TypeError: an option is unknown.
            ValueError: `capacity` is no integer from 1 to n, or an error of `prune`.
        """
        inputs, limits, choice_options = self._read_options("select", image, text, options)
        n = inputs.image.shape[1]
        is_valid = is_integer(capacity) and 1 <= capacity <= n
        expect("capacity", capacity, is_valid, f"an integer from 1 to {n}, the tokens of an image")
        picks = self.choose(inputs, limits, **choice_options)
        # `gather` raises for a concrete count above the capacity. Clipped counts make `select`
        # return the same with and without jit.
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
        """Exports `select` with the weights to a file, as one StableHLO program of `jax.export`.

        The program runs without this package. It maps float32 image tokens [b, n, d], word
        embeddings [b, l, e] and a boolean mask of real words [b, l] to a dict of "index" [b, k],
        "tokens" [b, k, d], "valid" [b, k] and "count" [b], as in `Pruned`. For a policy that reads
        no text, the image tokens are the only input.

        Args:
            path: file to write; parent folders are created.
            num_tokens: n, the number of image tokens.
            num_words: l, the number of words, including padding.
            capacity: k, the padded size; None for the budget, or else T_max.
            batch: b, a number, or a name for a symbolic batch size.
            platforms: platforms that the program is lowered for.
            **options: options of `select`; see `SelectOptions`.

        Returns:
            The path of the file.

        Raises:
            MissingPackageError: flatbuffers is not installed.
            ValueError: an argument is out of range, or an error of `select`.
        """
        from jax import export  # old versions of jax need flatbuffers to import it

        need("flatbuffers", "Policy.export writes a program")
        for name, value, minimum in (("num_tokens", num_tokens, 1), ("num_words", num_words, 0)):
            is_valid = is_integer(value) and value >= minimum
            expect(name, value, is_valid, f"an integer from {minimum}")
        is_known = not isinstance(platforms, str) and {*platforms} <= {*_PLATFORMS}
        expect("platforms", platforms, is_known, f"a sequence of {', '.join(_PLATFORMS)}")
        self.check_weights()
        budget_count = self.budget.count(num_tokens) if self.budget.kind in EXACT else None
        max_count = options.get("max_steps") or self.longest(num_tokens)
        output_size = capacity or options.get("budget") or budget_count or max_count

        def program(image, text=None, text_mask=None):
            kept = self.select(image, text, capacity=output_size, text_mask=text_mask, **options)
            return kept._asdict()

        (batch_size,) = export.symbolic_shape(str(batch))
        feature_width, text_width = self.config.feature_width, self.config.text_width
        arguments = [jax.ShapeDtypeStruct((batch_size, num_tokens, feature_width), jnp.float32)]
        if text_width:
            text_shape = (batch_size, num_words, text_width)
            arguments.append(jax.ShapeDtypeStruct(text_shape, jnp.float32))
            arguments.append(jax.ShapeDtypeStruct(text_shape[:2], jnp.bool_))  # text_mask
        exported = export.export(jax.jit(program), platforms=tuple(platforms))(*arguments)
        path = local_path(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(exported.serialize())
        return path

    def train_loss(
        self,
        key: Array,
        image: ImageTokens,
        text: TextEmbeddings | None,
        lm_loss_fn: LmLossFn,
        **options: Unpack[LossOptions],
    ) -> tuple[Loss, Aux]:
        """Computes the training objective through the noise gate; see `stepprune_jax.train_loss`.

        The noise gate passes all tokens to the language model, but adds noise to the tokens that
        the policy would drop. Differentiate with respect to the weights only:
        `jax.grad(lambda params: policy.replace(params=params).train_loss(...), has_aux=True)`.

        Args:
            key: PRNG key; consumed.
            image: [b, n, d] image tokens.
            text: [b, l, e] word embeddings of the question, never of the answer.
            lm_loss_fn: maps the gated tokens [b, n, d] to the mean language-modeling loss [].
            **options: see `LossOptions`.

        Returns:
            The loss, and metrics of training.

        Raises:
            TypeError: an option is unknown.
            ValueError: `lm_loss_fn` returned no scalar, or an error of all functions of `Policy`.
        """
        arguments: dict[str, Any] = dict(options)
        self._check_names("train_loss", arguments, ("progress", *self.loss_options))
        inputs = self._read_inputs(image, text, arguments)
        progress = arguments.pop("progress", Progress())
        expect_type("progress", progress, Progress, "Progress(share, text_gate)")
        _expect_function("lm_loss_fn", lm_loss_fn)

        def scalar_loss(tokens):
            loss = lm_loss_fn(tokens)
            require_losses("lm_loss_fn", loss, (), ONE_LOSS)
            return jnp.asarray(loss)

        return self.loss(check_key(key), inputs, scalar_loss, progress, **arguments)

    def rloo_loss(
        self,
        key: Array,
        image: ImageTokens,
        text: TextEmbeddings | None,
        answer_loss_fn: AnswerLossFn,
        settings: RlooSettings | None = None,
        **masks: Unpack[Masks],
    ) -> tuple[Loss, Aux]:
        """Computes the RLOO objective on sampled subsets; see `selectors.rloo.rloo_loss`.

        Only the log-probabilities of the policy are differentiated, so `answer_loss_fn` needs no
        gradient. A policy with randomly initialized weights learns only if a few random tokens
        suffice for some right answers; see `measure_subset_gain`.

        Args:
            key: PRNG key; consumed.
            image: [b, n, d] image tokens.
            text: [b, l, e] word embeddings of the question, never of the answer.
            answer_loss_fn: maps a `Pruned` of g subsets, whose arrays are [b, g, ...], such as
                tokens [b, g, k, d], to the mean loss of the answer's tokens, [b, g].
            settings: number and sizes of the subsets; None for the defaults of
                `stepprune_jax.RlooSettings`: 8 subsets, of at most 11 % of the tokens.
            **masks: `image_mask` [b, n] and `text_mask` [b, l], True at real tokens and words.

        Returns:
            The loss, and metrics of training.

        Raises:
            ValueError: the method samples no subsets, `answer_loss_fn` returned losses of another
                shape than [b, g], or an error of all functions of `Policy`.
        """
        self._check_names("rloo_loss", masks, ("settings",))
        inputs = self._read_inputs(image, text, dict(masks))
        settings = self._read_settings(settings)
        _expect_function("answer_loss_fn", answer_loss_fn)
        return rloo_loss(self, settings, check_key(key), inputs, answer_loss_fn)

    def warm_start_loss(
        self,
        key: Array,
        image: ImageTokens,
        text: TextEmbeddings | None,
        importance: TokenScores,
        **masks: Unpack[Masks],
    ) -> tuple[Loss, Aux]:
        """Computes the loss of the warm start; see `stepprune_jax.warm_start_loss`.

        Train with this loss before `rloo_loss`. The policy then learns where the frozen model
        reads an answer, even if random tokens never suffice for one. `token_importance` computes
        the importance of tokens from a loss of the frozen model.

        Args:
            key: PRNG key; consumed.
            image: [b, n, d] image tokens.
            text: [b, l, e] word embeddings of the question, never of the answer.
            importance: [b, n] importance of each token, at least 0.
            **masks: `image_mask` [b, n] and `text_mask` [b, l], True at real tokens and words.

        Returns:
            The loss, and metrics: `covered` is the mean fraction of the importance that eight
            sampled tokens have; `entropy` is the mean entropy of the pointer in nats.

        Raises:
            ValueError: the method samples no subsets, `importance` has another shape than [b, n],
                or an error of all functions of `Policy`.
        """
        self._check_names("warm_start_loss", masks, ())
        inputs = self._read_inputs(image, text, dict(masks))
        warm = self.warm_start(check_key(key), inputs, jnp.asarray(importance))
        return warm.loss, Aux({"covered": warm.covered, "entropy": warm.entropy}, ())

    def measure_subset_gain(
        self,
        key: Array,
        image: ImageTokens,
        text: TextEmbeddings | None,
        answer_loss_fn: AnswerLossFn,
        settings: RlooSettings | None = None,
        **masks: Unpack[Masks],
    ) -> SubsetGain:
        """Measures whether this policy can be trained with RLOO, or needs the noise gate first.

        RLOO learns only if sampled subsets of tokens improve the answers. Pass a few hundred
        training questions.

        Args:
            key: PRNG key; consumed.
            image: [b, n, d] image tokens.
            text: [b, l, e] word embeddings of the question, never of the answer.
            answer_loss_fn: loss of the answer for each subset, as in `rloo_loss`. It is also called
                with a single subset of all tokens, g = 1.
            settings: number and sizes of the subsets, as in `rloo_loss`.
            **masks: `image_mask` [b, n] and `text_mask` [b, l], True at real tokens and words.

        Returns:
            The gain of subsets. `suffices` is the decision; `print` shows the measurements and
            the functions to train with next.

        Raises:
            ValueError: an error of `rloo_loss`.
        """
        self._check_names("measure_subset_gain", masks, ("settings",))
        inputs = self._read_inputs(image, text, dict(masks))
        settings = self._read_settings(settings)
        _expect_function("answer_loss_fn", answer_loss_fn)
        rewards = subset_rewards(self, settings, check_key(key), inputs, answer_loss_fn)
        return subset_gain([rewards])

    def diagnose(
        self,
        loss_fn: LossFn,
        image: ImageTokens,
        text: TextEmbeddings | None,
        budgets: Sequence[int],
        *,
        key: Array | None = None,
        recipe: str = "",
        **masks: Unpack[Masks],
    ) -> list[Diagnosis]:
        """Diagnoses learning: compares the loss with the kept tokens to four baselines.

        A falling training loss is no proof of learning: it also falls if the policy only learns
        which tokens are useful in any image. The baselines are all tokens, no tokens, the same
        number of random tokens, and the tokens that the policy keeps for another question of the
        batch. The diagnosis also reports how many tokens a learned stop keeps.

        Args:
            loss_fn: maps kept tokens to the loss of each row, [b], or to a tuple (loss, whether the
                answer is right). Entries that are not `valid` are padding; without tokens, all
                entries are padding.
            image: [b, n, d] image tokens of questions that were not used for training. With some
                hundred rows, differences of one percent are significant.
            text: [b, l, e] word embeddings of the questions. The other question of a row is the
                question of its neighbor.
            budgets: numbers of tokens to keep; one diagnosis each.
            key: PRNG key of the random tokens; consumed.
            recipe: "gate" for a policy that was trained with `train_loss`, "rloo" for one that was
                trained with `rloo_loss`. The diagnosis then says if it should change.
            **masks: `image_mask` [b, n] and `text_mask` [b, l], True at real tokens and words.

        Returns:
            A `Diagnosis` for each budget; `print` shows a report.

        Raises:
            ValueError: `loss_fn` did not return one loss per row, the recipe is unknown, or an
                error of all functions of `Policy`.
        """
        expect("recipe", recipe, recipe in ("", "gate", "rloo"), "gate or rloo, or nothing")
        _expect_function("loss_fn", loss_fn)
        self._check_names("diagnose", masks, ("key", "recipe"))
        inputs = self._read_inputs(image, text, dict(masks))
        is_list = isinstance(budgets, Sequence) and len(budgets) > 0
        is_valid = is_list and all(map(is_integer, budgets))
        expect("budgets", budgets, is_valid, "a list of numbers of tokens, such as [16, 64]")
        key = jax.random.key(0) if key is None else check_key(key)
        stops = measure_stop(self, inputs) if self.has_stop else None
        return [
            measure(
                self,
                inputs,
                loss_fn,
                budget,
                key=jax.random.fold_in(key, i),
                recipe=recipe,
                stops=stops,
            )
            for i, budget in enumerate(budgets)
        ]

    @jax.transfer_guard("allow")
    def calibrate(
        self: AnyPolicy,
        batches: Iterable[Batch],
        decoder: DecoderFns | None = None,
    ) -> AnyPolicy:
        """Measures how many tokens the policy keeps on average at each stop bias.

        A calibrated policy can be given a mean budget, such as `policy.with_budget("mean:48")`. The
        function also logs the counts of the learned stop, with a warning if nearly all of them are
        the smallest or the largest possible count.

        Args:
            batches: pairs of image tokens [b, n, d] and word embeddings [b, l, e] of validation
                questions, without padding. A few hundred questions suffice. A program is compiled
                for each shape.
            decoder: functions of a custom decoder, as in `prune`.

        Returns:
            A copy of the policy with its calibration.

        Raises:
            ValueError: the method has no learned stop, or there are no batches.
        """
        if not self.has_stop:
            raise UserError(f"{self.name} has no learned stop to calibrate")
        options: dict[str, Any] = {} if decoder is None else {"decoder": decoder}
        self._check_names("calibrate", options, ("decoder",))
        policy = self.program()
        batch_margins, batch_num_tokens = [], []
        for i, batch in enumerate(batches):
            if not (isinstance(batch, tuple | list) and len(batch) == 2):
                actual = type(batch).__name__
                raise UserError(f"batches[{i}]: expected a pair (image, text), got {actual}")
            inputs = self._read_inputs(*batch, dict(options))
            batch_margins.append(np.asarray(_stop_margins(policy, inputs, **options)))
            b, n = inputs.image.shape[:2]
            batch_num_tokens.append(np.full(b, n))
        if not batch_margins:
            raise UserError("batches is empty, expected at least one")
        margin, num_tokens = _stack_rows(batch_margins), np.concatenate(batch_num_tokens)
        log_stops(count_stops(margin, num_tokens, self.min_tokens, float(self.stop_bias)))
        return self.replace(calibration=calibrate(margin, num_tokens, self.min_tokens))

    # Arguments.

    def _read_options(
        self, function: str, image: Any, text: Any, options: Mapping[str, Any]
    ) -> tuple[Inputs, Limits, dict[str, Any]]:
        """Checks the arguments of `prune` or `select`.

        Args:
            function: name of the function, for messages.
            image: [b, n, d] image tokens.
            text: [b, l, e] word embeddings of the question, or None.
            options: keyword arguments of the call; see `SelectOptions`.

        Returns:
            A tuple (inputs, limits, choice_options). inputs: the checked arrays. limits: the budget
            of the call, or else of the policy, and all other limits. choice_options: the remaining
            options, which `choose` takes.

        Raises:
            TypeError: an option is unknown.
            ValueError: an array or option has another type, shape or dtype.
        """
        names = ("budget", *_LIMITS, *self.choice_options)
        self._check_names(function, options, names)
        arguments = dict(options)
        inputs = self._read_inputs(image, text, arguments)
        budget = self._read_budget(inputs, arguments.pop("budget", None))
        limits = Limits(budget, **{name: arguments.pop(name, None) for name in _LIMITS})
        return inputs, limits, arguments

    def _check_names(self, function: str, options: Mapping[str, Any], names: Sequence[str]) -> None:
        """Raises a TypeError for an option that is neither in `names` nor a mask."""
        valid_names = (*names, *Masks.__annotations__)
        for option in options.keys() - {*valid_names}:
            hint = f"its options: {', '.join(valid_names)}.{nearest(option, valid_names)}"
            raise TypeError(f"{type(self).__name__}.{function} has no option {option!r}; {hint}")
        if "decoder" in options:
            expect_type("decoder", options["decoder"], DecoderFns, "DecoderFns(init, step)")
        if options.get("key") is not None:
            check_key(options["key"])

    def _read_inputs(self, image: Any, text: Any, options: dict[str, Any]) -> Inputs:
        """Creates and checks the inputs of a call.

        Args:
            image: [b, n, d] image tokens.
            text: [b, l, e] word embeddings of the question, or None.
            options: keyword arguments of the call. The masks are removed from this dict.

        Returns:
            The inputs, with the statistics of the policy.

        Raises:
            ValueError: the policy has no weights, text is missing, or an array has another type,
                shape or dtype.
        """
        masks = {name: options.pop(name, None) for name in Masks.__annotations__}
        is_built_in = options.get("decoder", POINTER) is POINTER
        self.check_weights(skipped_part="" if is_built_in else "decoder")
        width = self.config.text_width if self.reads_text else 0
        if width == 0:
            text, masks["text_mask"] = None, None
        elif text is None:
            raise UserError(
                f"text is None, expected word embeddings (b, l, {width}), as this policy reads the "
                f"question; for no question give zeros of shape (b, 1, {width}) and a text_mask of "
                "False"
            )
        # The statistics are leaves of a policy: an optimizer of all leaves would change them.
        stats = jax.lax.stop_gradient(self.stats)
        inputs = Inputs(image, text, **masks, stats=stats)
        inputs.check(self.config.feature_width, width)
        return inputs

    def _read_settings(self, settings: RlooSettings | None) -> RlooSettings:
        """Returns the settings of RLOO, with None replaced by the defaults."""
        if not self.samples_subsets:
            raise UserError(f"{self.name} samples no subsets of tokens: train it with train_loss")
        settings = RlooSettings() if settings is None else settings
        expect_type("settings", settings, RlooSettings, "RlooSettings")
        return settings

    def _read_budget(self, inputs: Inputs, budget: Any) -> ArrayLike | None:
        """Returns the exact number of tokens to keep; None if the learned stop decides.

        Args:
            inputs: image and question.
            budget: the option `budget` of the call; None for the budget of the policy.

        Returns:
            One count, or one count per row, or None.

        Raises:
            ValueError: the budget has another type, or the method does not support its kind.
        """
        if isinstance(budget, str | float | Budget):
            value = str(budget) if isinstance(budget, Budget) else repr(budget)
            raise UserError(
                f"budget is {value}, expected a count, or one for each row; a share, a mean or the "
                "learned stop is set by policy.with_budget"
            )
        if budget is not None:
            return budget
        self.require_kind(self.budget)
        if self.budget.kind == "count":
            return self.budget.value
        if self.budget.kind == "rate":
            num_tokens = jnp.sum(inputs.real, axis=1, dtype=jnp.int32)
            return self.budget.counts(num_tokens, inputs.image.shape[1])
        return None


def _expect_function(name: str, value: Any) -> None:
    """Raises a UserError that names an argument unless it is callable."""
    if not callable(value):
        raise UserError(f"{name} is a {type(value).__name__}, expected a function")


def _stack_rows(margins: Sequence[Float[np.ndarray, "_ _"]]) -> Float[np.ndarray, "q t"]:
    """Concatenates stop margins of batches whose images have different numbers of steps.

    Args:
        margins: [b, t] margins of each batch; t differs.

    Returns:
        [q, t] margins of all questions, padded with infinity: a row stops at an infinite margin.
    """
    steps = max(margin.shape[1] for margin in margins)
    padded = [
        np.pad(margin, ((0, 0), (0, steps - margin.shape[1])), constant_values=np.inf)
        for margin in margins
    ]
    return np.concatenate(padded)


@jax.jit
def _stop_margins(policy: Policy, inputs: Inputs, **options: Any) -> Float[Array, "b t"] | None:
    """Computes the stop margins of all steps up to T_max; None without a learned stop."""
    return policy.order(inputs, policy.longest(inputs.image.shape[1]), **options).margin
