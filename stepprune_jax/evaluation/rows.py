"""Plans the rows of the results table and their answer files.

A row is a pruning method at one token budget. Rows that differ only in their budget share a label,
the name that the table shows.
"""

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from stepprune_jax.benchmarks import Benchmark, BenchmarkQuestion
from stepprune_jax.benchmarks.answer_files import AnswerFile, Provenance, questions_digest
from stepprune_jax.benchmarks.folder import BENCHMARK as FOLDER
from stepprune_jax.checkpoints.folder import ModelFolder
from stepprune_jax.checkpoints.identity import model_identity, policy_digest
from stepprune_jax.evaluation.calibrate import Biases
from stepprune_jax.evaluation.names import learned_stop
from stepprune_jax.evaluation.settings import EvalSettings, EvaluationRun
from stepprune_jax.models.config import ModelConfig
from stepprune_jax.pruning import Budget, Pruner
from stepprune_jax.registry import PRUNERS, build_pruner, option_types, user_digest
from stepprune_jax.selectors import TrainedPruner
from stepprune_jax.user_input import UserError, local_path


class TableRow(NamedTuple):
    """One row of a table: a pruning method at one budget. Built by `plan_rows`.

    Attributes:
        label: name of the row in the table.
        budget: number of tokens to keep.
        pruner: the pruning method with this budget.
        policy: label of the method's policy, a key of `Conditions.policies`; None for a method
            without weights.
    """

    label: str
    budget: Budget
    pruner: Pruner
    policy: str | None = None

    @property
    def mode(self) -> str:
        """The mode: "exact" if every image keeps the budget, "adaptive" if the count varies."""
        return "exact" if self.budget.is_exact else "adaptive"

    def count(self, num_tokens: int) -> int | None:
        """Returns the number of kept tokens of an image with `num_tokens` visual tokens.

        For a mean budget, the result is the mean over images. For a learned stop without a budget,
        it is None.
        """
        if self.budget.kind == "mean":
            return int(self.budget.number)
        return self.budget.count(num_tokens)

    @property
    def method_key(self) -> tuple[Pruner, str | None]:
        """A key that is equal for rows that differ only in their budget."""
        return dataclasses.replace(self.pruner.without_weights, budget=Budget()), self.policy


def plan_rows(
    settings: EvalSettings,
    config: ModelConfig,
    policies: Mapping[str, TrainedPruner],
    biases: Biases,
    seed: int,
    *,
    num_tokens: int | None = None,
) -> list[TableRow]:
    """Plans the rows of a table: each method at each budget of the settings.

    The first row is the unpruned model. The methods without weights follow, then the trained
    policies. A policy has rows with exact budgets, and with stop biases also rows with mean
    budgets. A policy that `settings.learned_stops` names also has a row without a budget.

    Args:
        settings: settings of the evaluation.
        config: configuration of the model.
        policies: the policies by label.
        biases: stop biases by label and budget. A stop bias makes a learned stop meet a budget on
            average.
        seed: seed of random methods.
        num_tokens: visual tokens of the largest image or video; None for those of the largest image
            that the model reads.

    Returns:
        The rows. A method that does not support the model has no row, unless `settings.methods`
        names it.

    Raises:
        UserError: a method that `settings.methods` names does not support the model, or an option
            is invalid.
    """
    rows = _plan_untrained_rows(settings, config, seed)
    num_tokens = config.max_image_tokens if num_tokens is None else num_tokens
    for label, policy in policies.items():
        rows += _plan_policy_rows(settings, num_tokens, label, policy, biases.get(label))
    return [row for row in rows if settings.is_selected(row.policy or row.label)]


def _plan_untrained_rows(settings: EvalSettings, config: ModelConfig, seed: int) -> list[TableRow]:
    """Plans the rows of the unpruned model and of the methods without weights.

    Args:
        settings: settings of the evaluation.
        config: configuration of the model.
        seed: seed of random methods.

    Raises:
        UserError: as described in `plan_rows`.
    """
    budgets = [Budget.parse(budget) for budget in settings.budgets]
    rows = []
    for name, method in PRUNERS.items():
        if method.config_type is not None:  # a trained method, see `_plan_policy_rows`
            continue
        options = {"seed": seed} if method.is_random else {}
        options |= settings.pruner_options.get(name, {})
        # All tokens and no tokens are methods with a single budget.
        has_one_budget = len(method.budgets) == 1
        for budget in [method.default_budget()] if has_one_budget else budgets:
            pruner = build_pruner(name, budget, options=options)
            try:
                pruner.check(config, config.max_image_tokens)
            except UserError:
                if settings.is_named(method.label):
                    raise
                continue
            rows.append(TableRow(method.label, budget, pruner))
    return rows


def _plan_policy_rows(
    settings: EvalSettings,
    num_tokens: int,
    label: str,
    policy: TrainedPruner,
    biases: Mapping[int | str, float] | None,
) -> list[TableRow]:
    """Plans the rows of one policy: exact budgets, mean budgets, and no budget.

    Args:
        settings: settings of the evaluation.
        num_tokens: visual tokens of the largest image.
        label: label of the policy.
        policy: the policy.
        biases: stop bias for each budget of the settings. If None, the policy has no rows with mean
            budgets.
    """

    def make_row(row_label: str, budget: Budget, **arguments: Any) -> TableRow:
        pruner = build_pruner(None, budget, policy=policy, **arguments)
        return TableRow(row_label, budget, pruner, policy=label)

    budgets = [Budget.parse(budget) for budget in settings.budgets]
    options = settings.pruner_options.get(policy.name)
    rows = [make_row(label, budget, options=options) for budget in budgets]
    if policy.has_stop and biases is not None:
        for budget_setting, exact_budget in zip(settings.budgets, budgets, strict=True):
            mean_budget = Budget("mean", exact_budget.exact_count(num_tokens))
            rows.append(make_row(label, mean_budget, stop_bias=biases[budget_setting]))
    # Instead of a learned stop, some methods keep all tokens with a score above a threshold.
    if label in settings.learned_stops and "adaptive" in policy.budgets:
        arguments = {"stop_bias": 0.0} if policy.has_stop else {"options": options}
        rows.append(make_row(learned_stop(label), Budget("adaptive"), **arguments))
    return rows


@dataclasses.dataclass(frozen=True)
class Conditions:
    """Everything that the answers of a run depend on.

    Attributes:
        run: settings of the run.
        source: the model.
        policies: the policies by label.
        folder: folder of the answer files.
    """

    run: EvaluationRun
    source: ModelFolder
    policies: Mapping[str, TrainedPruner]
    folder: Path

    @property
    def settings(self) -> EvalSettings:
        """The settings of the evaluation."""
        return self.run.eval

    @functools.cached_property
    def num_tokens(self) -> int:
        """Visual tokens of the largest image that the model reads, or of the largest video.

        If all questions of a data folder are about videos, no image counts. One frame of each video
        is decoded.
        """
        num_image_tokens = self.source.config.max_image_tokens
        if self.settings.benchmark_names != [FOLDER.name]:
            return num_image_tokens
        questions = self.run.questions(FOLDER.name)
        videos = {q.video.identity: q.video for q in questions if q.video is not None}
        backbone = self.source.backbone
        settings = backbone.image_settings(self.source.vision_folder or self.source.folder)
        counts = [backbone.inspect_video(settings, video).num_tokens for video in videos.values()]
        has_images = any(question.video is None for question in questions)
        return max([*counts, *([num_image_tokens] if has_images or not counts else [])])

    @functools.cached_property
    def weights(self) -> str:
        """Start of the model's identity, which identifies its weights in answer files."""
        return model_identity(self.source)[:16]

    @functools.cached_property
    def digests(self) -> dict[str, str]:
        """Digest of each policy by label."""
        return {label: policy_digest(policy) for label, policy in self.policies.items()}

    def rows(self, biases: Biases) -> list[TableRow]:
        """Plans the rows with these stop biases, as `plan_rows` does."""
        run = self.run
        return plan_rows(
            run.eval,
            self.source.config,
            self.policies,
            biases,
            run.seed,
            num_tokens=self.num_tokens,
        )

    def files(
        self, rows: Sequence[TableRow], benchmark: Benchmark, questions: Sequence[BenchmarkQuestion]
    ) -> list[AnswerFile]:
        """Returns the answer file of each row on a benchmark.

        Args:
            rows: the rows.
            benchmark: the benchmark.
            questions: all questions of the benchmark.

        Raises:
            UserError: two rows have the same file name, which consists of method, mode and rounded
                pruning rate.
        """
        digest = questions_digest(questions)
        files = [
            AnswerFile.of(self.folder, self._provenance(row, benchmark, digest, len(questions)))
            for row in rows
        ]
        row_by_path: dict[Path, TableRow] = {}
        for row, file in zip(rows, files, strict=True):
            first_row = row_by_path.setdefault(file.path, row)
            if first_row is not row:
                raise UserError(
                    f"{file.path} would hold the answers of {first_row.label!r} at "
                    f"{first_row.budget} and of {row.label!r} at {row.budget}: remove one budget, "
                    "or give the row another name"
                )
        return files

    def _provenance(
        self, row: TableRow, benchmark: Benchmark, questions: str, num_questions: int
    ) -> Provenance:
        """Returns all settings that determine the answers of a row.

        They are stored next to the answers. A run with another provenance cannot add answers.

        Args:
            row: the row.
            benchmark: the benchmark.
            questions: digest of the benchmark's questions.
            num_questions: number of the benchmark's questions.
        """
        settings = {
            "weights": self.weights,
            "dtype": self.run.model.dtype,
            "positions": self.settings.positions,
            "max_new_tokens": self.settings.longest_answer(benchmark),
        }
        # Settings that were introduced later are stored only if they differ from their default, so
        # that earlier files remain valid.
        if self.run.model.weights != "full":
            settings["language_weights"] = self.run.model.weights
        if row.policy is not None:
            settings["policy"] = self.digests[row.policy]
        pruner = row.pruner
        options = {}
        for name in option_types(type(pruner)):
            value = getattr(pruner, name)
            options[name] = list(value) if isinstance(value, tuple) else value
        source_digest = user_digest(pruner.name)
        if source_digest is None:
            settings |= options
        else:  # Options of a class of the user may have the names of other settings.
            settings |= {"source": source_digest, "options": options}
        if pruner.version > 1:
            settings["version"] = pruner.version
        settings |= self.source.config.image_bounds
        if row.budget.kind == "rate":
            settings["share"] = str(row.budget)
        stop_bias = None
        if isinstance(pruner, TrainedPruner) and pruner.has_stop and not row.budget.is_exact:
            stop_bias = float(pruner.stop_bias)
        return Provenance(
            benchmark=benchmark.name,
            questions=questions,
            asked=num_questions,
            method=row.label,
            mode=row.mode,
            budget=row.count(self.num_tokens),
            num_tokens=self.num_tokens,
            stop_bias=stop_bias,
            # The name in the folder or hub id. Folders of the hub's cache are named by hashes.
            model=local_path(self.source.origins[0]).resolve().name,
            made=settings,
        )
