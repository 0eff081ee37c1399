"""The rows of a table: a pruning method at a budget, and the file of its answers."""

import dataclasses
import functools
import hashlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import jax
import numpy as np

from stepprune_jax.benchmarks import Benchmark, BenchmarkQuestion
from stepprune_jax.benchmarks.answer_files import AnswerFile, Provenance, questions_digest
from stepprune_jax.checkpoints.folder import ModelFolder
from stepprune_jax.checkpoints.identity import model_identity
from stepprune_jax.evaluation.calibrate import Biases
from stepprune_jax.evaluation.names import learned_stop
from stepprune_jax.evaluation.settings import EvalSettings, EvaluationRun
from stepprune_jax.models.config import ModelConfig
from stepprune_jax.pruning import Budget, Pruner
from stepprune_jax.registry import PRUNERS, build_pruner
from stepprune_jax.selectors import TrainedPruner
from stepprune_jax.user_input import UserError, local_path


class TableRow(NamedTuple):
    """One row of a table, before any question is answered; `policy` is its policy's name."""

    label: str
    budget: Budget
    pruner: Pruner
    policy: str | None = None

    @property
    def mode(self) -> str:
        """Mode of the budget: "exact" for every image, or "adaptive" with a learned stop."""
        return "exact" if self.budget.is_exact else "adaptive"

    def count(self, num_tokens: int) -> int | None:
        """Returns the tokens kept of an image, a mean if adaptive; None for a learned stop."""
        return self.budget.value if self.budget.kind == "mean" else self.budget.count(num_tokens)

    @property
    def shared(self) -> tuple[Pruner, str | None]:
        """A key that is equal for rows that differ in their budget only."""
        return dataclasses.replace(self.pruner.without_weights, budget=Budget()), self.policy


def plan_rows(
    settings: EvalSettings,
    config: ModelConfig,
    policies: Mapping[str, TrainedPruner],
    biases: Biases,
    seed: int,
) -> list[TableRow]:
    """Plans the rows of the settings; skips pruners that do not support the model.

    The rows are all tokens, the methods without training at each budget, then each policy: with
    exact budgets, with mean budgets if it has biases, and with its learned stop if requested.
    """
    budgets = [Budget.parse(budget) for budget in settings.budgets]
    rows, n, options_of = [], config.max_image_tokens, settings.pruner_options
    for name, kind in PRUNERS.items():
        if kind.config_type is not None:
            continue
        options = ({"seed": seed} if kind.is_random else {}) | options_of.get(name, {})
        for budget in [Budget()] if kind.budgets == ("all",) else budgets:
            row = TableRow(kind.label, budget, build_pruner(name, budget, options=options))
            try:
                row.pruner.check(config, n)
            except UserError:
                if settings.names(kind.label):
                    raise
                continue
            rows.append(row)
    for name, policy in policies.items():
        fields = {"policy": policy, "options": options_of.get(policy.name)}
        rows += [TableRow(name, b, build_pruner(None, b, **fields), name) for b in budgets]
        counts_by_threshold = not policy.has_stop and "own" in policy.budgets
        if name not in biases and not counts_by_threshold:
            continue
        for budget_setting, exact in (
            zip(settings.budgets, budgets, strict=True) if policy.has_stop else ()
        ):
            budget, bias = Budget("mean", exact.count(n)), biases[name][budget_setting]
            pruner = build_pruner(None, budget, policy=policy, stop_bias=bias)
            rows.append(TableRow(name, budget, pruner, name))
        if name in settings.learned_stops:
            learned_stop_budget = Budget("own")
            fields = (
                {"options": options_of.get(policy.name)}
                if counts_by_threshold
                else {"stop_bias": 0.0}
            )
            pruner = build_pruner(None, learned_stop_budget, policy=policy, **fields)
            rows.append(TableRow(learned_stop(name), learned_stop_budget, pruner, name))
    return [row for row in rows if settings.wants(row.policy or row.label)]


@dataclasses.dataclass(frozen=True)
class Conditions:
    """Conditions of all answers of a run: its settings, model, policies, and folder of answers."""

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
        """N, the visual tokens of the largest image."""
        return self.source.config.max_image_tokens

    @functools.cached_property
    def weights(self) -> str:
        """The fingerprint of the model."""
        return model_identity(self.source)[:16]

    @functools.cached_property
    def digests(self) -> dict[str, str]:
        """The fingerprint of each policy, by row name."""
        return {name: policy_digest(policy) for name, policy in self.policies.items()}

    def rows(self, biases: Biases) -> list[TableRow]:
        """Plans the rows, given stop biases as for `plan_rows`."""
        run = self.run
        return plan_rows(run.eval, self.source.config, self.policies, biases, run.seed)

    def files(
        self, rows: Sequence[TableRow], benchmark: Benchmark, questions: Sequence[BenchmarkQuestion]
    ) -> list[AnswerFile]:
        """Returns the answer file of each row; rejects rows that would share one."""
        digest, owners = questions_digest(questions), {}
        files = [
            AnswerFile.of(self.folder, self._provenance(row, benchmark, digest, len(questions)))
            for row in rows
        ]
        for row, file in zip(rows, files, strict=True):
            owner = owners.setdefault(file.path, row)
            if owner is not row:
                raise UserError(
                    f"{file.path} would hold the answers of {owner.label!r} at {owner.budget} and "
                    f"of {row.label!r} at {row.budget}: remove one budget, or give the row "
                    "another name"
                )
        return files

    def _provenance(
        self, row: TableRow, benchmark: Benchmark, questions: str, num_questions: int
    ) -> Provenance:
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
        pruner, exact = row.pruner, row.budget.is_exact
        base = {field.name for field in dataclasses.fields(TrainedPruner)}
        for field in dataclasses.fields(pruner):
            if field.name not in base:
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
            stop_bias=float(pruner.stop_bias) if pruner.has_stop and not exact else None,
            # The last part of the folder or hub id; the hub's own folders are hashes.
            model=local_path(self.source.origins[0]).resolve().name,
            made=settings,
        )


def policy_digest(policy: TrainedPruner) -> str:
    """Fingerprints everything that determines a policy's choices, except the stop bias."""
    digest = hashlib.sha256(repr(policy.config).encode())
    leaves = jax.tree_util.tree_leaves_with_path((policy.params, policy.stats))
    for path, leaf in leaves:
        digest.update(jax.tree_util.keystr(path).encode())
        digest.update(np.asarray(leaf).tobytes())
    return digest.hexdigest()[:16]
