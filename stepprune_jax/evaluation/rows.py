"""Plans the rows of a table, each a pruning method at a budget, and their answer files."""

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from stepprune_jax.benchmarks import Benchmark, BenchmarkQuestion
from stepprune_jax.benchmarks.answer_files import AnswerFile, Provenance, questions_digest
from stepprune_jax.checkpoints.folder import ModelFolder
from stepprune_jax.checkpoints.identity import model_identity, policy_digest
from stepprune_jax.evaluation.calibrate import Biases
from stepprune_jax.evaluation.names import learned_stop
from stepprune_jax.evaluation.settings import EvalSettings, EvaluationRun
from stepprune_jax.models.config import ModelConfig
from stepprune_jax.pruning import Budget, Pruner
from stepprune_jax.registry import PRUNERS, build_pruner
from stepprune_jax.selectors import TrainedPruner
from stepprune_jax.user_input import UserError, local_path


class TableRow(NamedTuple):
    """One row of a table.

    Attributes:
        label: name of the row in tables.
        budget: tokens to keep.
        pruner: the pruning method with this budget.
        policy: name of the row's policy in `Conditions.policies`; None for a method without
            weights.
    """

    label: str
    budget: Budget
    pruner: Pruner
    policy: str | None = None

    @property
    def mode(self) -> str:
        """Mode of the budget: "exact" for every image, or "adaptive" with a learned stop."""
        return "exact" if self.budget.is_exact else "adaptive"

    def count(self, num_tokens: int) -> int | None:
        """Returns the number of tokens kept of an image with `num_tokens` tokens.

        For a mean budget this is the mean over images. For a learned stop it is None.
        """
        return self.budget.value if self.budget.kind == "mean" else self.budget.count(num_tokens)

    @property
    def shared(self) -> tuple[Pruner, str | None]:
        """A key that is equal for rows that differ only in their budget."""
        return dataclasses.replace(self.pruner.without_weights, budget=Budget()), self.policy


def plan_rows(
    settings: EvalSettings,
    config: ModelConfig,
    policies: Mapping[str, TrainedPruner],
    biases: Biases,
    seed: int,
) -> list[TableRow]:
    """Plans the rows that the settings ask for.

    The rows are all tokens, then the methods without weights at each budget, then each policy: with
    exact budgets, with mean budgets if it has biases, and with its learned stop if requested.

    Args:
        settings: settings of the evaluation.
        config: configuration of the model.
        policies: the policies by row name.
        biases: stop biases by row name and budget; a policy without biases gets no mean budgets.
        seed: seed of random methods.

    Returns:
        The rows. Methods that do not support the model are skipped, unless `settings.methods` names
        them.

    Raises:
        ValueError: a named method does not support the model, or an option is bad.
    """
    rows = _plan_untrained_rows(settings, config, seed)
    for name, policy in policies.items():
        rows += _plan_policy_rows(settings, config.max_image_tokens, name, policy, biases.get(name))
    return [row for row in rows if settings.wants(row.policy or row.label)]


def _plan_untrained_rows(settings: EvalSettings, config: ModelConfig, seed: int) -> list[TableRow]:
    """Plans the rows of methods without weights, as described in `plan_rows`."""
    budgets = [Budget.parse(budget) for budget in settings.budgets]
    rows = []
    for name, kind in PRUNERS.items():
        if kind.config_type is not None:
            continue
        options = {"seed": seed} if kind.is_random else {}
        options |= settings.pruner_options.get(name, {})
        for budget in [Budget()] if kind.budgets == ("all",) else budgets:
            row = TableRow(kind.label, budget, build_pruner(name, budget, options=options))
            try:
                row.pruner.check(config, config.max_image_tokens)
            except UserError:
                if settings.names(kind.label):
                    raise
                continue
            rows.append(row)
    return rows


def _plan_policy_rows(
    settings: EvalSettings,
    num_tokens: int,
    name: str,
    policy: TrainedPruner,
    biases: Mapping[int | str, float] | None,
) -> list[TableRow]:
    """Plans the rows of one policy, as described in `plan_rows`.

    Args:
        settings: settings of the evaluation.
        num_tokens: visual tokens of the largest image.
        name: name of the policy's rows.
        policy: the policy.
        biases: stop biases by budget, or None.
    """
    budgets = [Budget.parse(budget) for budget in settings.budgets]
    options = settings.pruner_options.get(policy.name)
    rows = [
        TableRow(name, budget, build_pruner(None, budget, policy=policy, options=options), name)
        for budget in budgets
    ]
    counts_by_threshold = not policy.has_stop and "adaptive" in policy.budgets
    if biases is None and not counts_by_threshold:
        return rows
    if biases is not None and policy.has_stop:
        for budget_setting, exact_budget in zip(settings.budgets, budgets, strict=True):
            budget = Budget("mean", exact_budget.count(num_tokens))
            bias = biases[budget_setting]
            pruner = build_pruner(None, budget, policy=policy, stop_bias=bias)
            rows.append(TableRow(name, budget, pruner, name))
    if name in settings.learned_stops:
        budget = Budget("adaptive")
        if counts_by_threshold:
            pruner = build_pruner(None, budget, policy=policy, options=options)
        else:
            pruner = build_pruner(None, budget, policy=policy, stop_bias=0.0)
        rows.append(TableRow(learned_stop(name), budget, pruner, name))
    return rows


@dataclasses.dataclass(frozen=True)
class Conditions:
    """Everything that the answers of a run depend on.

    Attributes:
        run: settings of the run.
        source: the model.
        policies: the policies by row name.
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

    @property
    def num_tokens(self) -> int:
        """Visual tokens of the largest image."""
        return self.source.config.max_image_tokens

    @functools.cached_property
    def weights(self) -> str:
        """Start of the model's identity, which identifies its weights in answer files."""
        return model_identity(self.source)[:16]

    @functools.cached_property
    def digests(self) -> dict[str, str]:
        """Digest of each policy by row name."""
        return {name: policy_digest(policy) for name, policy in self.policies.items()}

    def rows(self, biases: Biases) -> list[TableRow]:
        """Plans the rows with these stop biases, as `plan_rows` does."""
        run = self.run
        return plan_rows(run.eval, self.source.config, self.policies, biases, run.seed)

    def files(
        self, rows: Sequence[TableRow], benchmark: Benchmark, questions: Sequence[BenchmarkQuestion]
    ) -> list[AnswerFile]:
        """Returns the answer file of each row.

        Raises:
            ValueError: two rows would have the same file.
        """
        digest = questions_digest(questions)
        files = [
            AnswerFile.of(self.folder, self._provenance(row, benchmark, digest, len(questions)))
            for row in rows
        ]
        row_of_path: dict[Path, TableRow] = {}
        for row, file in zip(rows, files, strict=True):
            first_row = row_of_path.setdefault(file.path, row)
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
        """Returns the conditions that are stored with the answers of a row.

        Args:
            row: the row.
            benchmark: the benchmark.
            questions: digest of its questions.
            num_questions: number of its questions.
        """
        settings = {
            "weights": self.weights,
            "dtype": self.run.model.dtype,
            "positions": self.settings.positions,
            "max_new_tokens": self.settings.longest_answer(benchmark),
        }
        if self.run.model.weights != "full":
            settings["language_weights"] = self.run.model.weights
        if row.policy is not None:
            settings["policy"] = self.digests[row.policy]
        pruner, is_exact = row.pruner, row.budget.is_exact
        shared_fields = {field.name for field in dataclasses.fields(TrainedPruner)}
        for field in dataclasses.fields(pruner):
            if field.name not in shared_fields:
                value = getattr(pruner, field.name)
                settings[field.name] = list(value) if isinstance(value, tuple) else value
        if pruner.version > 1:
            settings["version"] = pruner.version
        settings |= self.source.config.image_bounds
        if row.budget.kind == "rate":
            settings["share"] = str(row.budget)
        return Provenance(
            benchmark=benchmark.name,
            questions=questions,
            asked=num_questions,
            method=row.label,
            mode=row.mode,
            budget=row.count(self.num_tokens),
            num_tokens=self.num_tokens,
            stop_bias=float(pruner.stop_bias) if pruner.has_stop and not is_exact else None,
            # The name in the folder or hub id. Folders of the hub's cache are named by hashes.
            model=local_path(self.source.origins[0]).resolve().name,
            made=settings,
        )
