"""The rows of a table: a pruning method at a budget, and the file of its answers."""

import dataclasses
import hashlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

from stepprune_jax.benchmarks import BENCHMARKS
from stepprune_jax.benchmarks.answer_files import (
    AnswerFile,
    Provenance,
    digest,
    questions_digest,
)
from stepprune_jax.benchmarks.questions import BenchmarkQuestion
from stepprune_jax.evaluation.names import ORACLE, own_stop
from stepprune_jax.evaluation.settings import EvalSettings
from stepprune_jax.models.family import ModelConfig
from stepprune_jax.pruning import PRUNERS, Budget, Method, Policy, Ranker, make_method
from stepprune_jax.pruning.oracle import make_oracle


class TableRow(NamedTuple):
    """One row of a table, before any question is answered.

    Attributes:
        label: its name in the table.
        budget: tokens to keep.
        method: the pruning method.
        policy: name of its policy; None for a row without training.
    """

    label: str
    budget: Budget
    method: Method
    policy: str | None = None

    @property
    def mode(self) -> str:
        """Mode of the budget: "exact" for every image, or "adaptive" with a learned stop."""
        return "exact" if self.budget.is_exact else "adaptive"

    @property
    def stop_bias(self) -> float | None:
        """Stop bias of an adaptive row."""
        return None if self.budget.is_exact else float(self.method.params.stop_bias)

    def count(self, num_tokens: int) -> int | None:
        """Returns the tokens kept of an image, on average if adaptive; None for an own stop."""
        return self.budget.value if self.budget.kind == "mean" else self.budget.count(num_tokens)

    @property
    def ranking(self) -> tuple[Any, str | None] | None:
        """Key of the ranking, equal for rows that share it; None for methods without ranking."""
        pruner = self.method.pruner
        if not isinstance(pruner, Ranker):
            return None
        return dataclasses.replace(pruner, budget=Budget()), self.policy

    def steps(self, num_tokens: int) -> int:
        """Returns the length of the order that the row needs."""
        if self.budget.is_exact:
            return self.budget.count(num_tokens)
        return self.method.pruner.most(num_tokens)


def plan_rows(
    settings: EvalSettings,
    config: ModelConfig,
    policies: Mapping[str, Policy],
    biases: Mapping[str, Mapping[int | str, float]],
    seed: int,
    untrained: bool = True,
) -> list[TableRow]:
    """Plans the rows of a table in their order.

    Args:
        settings: settings with budgets and methods.
        config: the model's configuration.
        policies: by row name.
        biases: for each policy that stops by itself, a stop bias for each budget.
        seed: seed of random rows.
        untrained: whether methods without training have rows.

    Returns:
        All tokens, the methods without training at each budget, then each policy: exact, adaptive,
        and its own stop if requested. Methods that do not support the model are skipped.
    """
    budgets = [Budget.parse(budget) for budget in settings.budgets]
    rows, n, given = [], config.max_image_tokens, settings.pruner_options
    for name, kind in PRUNERS.items() if untrained else ():
        if kind.config_type is not None:
            continue
        options = ({"seed": seed} if kind.is_random else {}) | given.get(name, {})
        for budget in [Budget()] if kind.budgets == ("all",) else budgets:
            row = TableRow(kind.label, budget, make_method(name, budget, options=options))
            try:
                row.method.pruner.check(config, n)
            except ValueError:
                if settings.methods and settings.wants(kind.label):
                    raise
                continue
            rows.append(row)
    for name, policy in policies.items():
        rows += [TableRow(name, b, make_method(None, b, policy=policy), name) for b in budgets]
        if name not in biases:
            continue
        for asked, exact in zip(settings.budgets, budgets, strict=True):
            budget, bias = Budget("mean", exact.count(n)), biases[name][asked]
            method = make_method(None, budget, policy=policy, stop_bias=bias)
            rows.append(TableRow(name, budget, method, name))
        if name in settings.own_stops:
            own = Budget("own")
            method = make_method(None, own, policy=policy, stop_bias=0.0)
            rows.append(TableRow(own_stop(name), own, method, name))
    return [row for row in rows if settings.wants(row.policy or row.label)]


def oracle_rows(
    settings: EvalSettings, benchmark: str, relevant: Sequence[Sequence[int]] | None, seed: int
) -> list[TableRow]:
    """Plans the rows of the oracle, if they are requested.

    Args:
        settings: settings with budgets and methods.
        benchmark: name of the benchmark, for the message.
        relevant: tokens that the answer to each question depends on; None if unknown.
        seed: seed of the tokens that fill a budget.

    Returns:
        A row for each budget.

    Raises:
        ValueError: unknown tokens.
    """
    if not settings.wants(ORACLE):
        return []
    if relevant is None:
        raise ValueError(
            f"the row {ORACLE!r} needs the patches that each answer depends on (test_scenes.jsonl, "
            f"docs/your-own-data.md), which the data of {benchmark!r} lack"
        )
    known = digest([" ".join(map(str, tokens)) for tokens in relevant])
    budgets = [Budget.parse(budget) for budget in settings.budgets]
    return [TableRow(ORACLE, b, make_oracle(b, relevant, known, seed)) for b in budgets]


@dataclasses.dataclass(frozen=True)
class Conditions:
    """Everything besides row and question that determines answers.

    Attributes:
        model: name of the model.
        weights: fingerprint of the model.
        dtype: dtype of its weights.
        num_tokens: N of its largest image.
        min_pixels: smallest area of a resized image, for a model that takes images of any size.
        seed: seed of the random rows.
        settings: settings of the evaluation.
        policies: the fingerprint of each, by row name.
    """

    model: str
    weights: str
    dtype: str
    num_tokens: int
    seed: int
    settings: EvalSettings
    policies: Mapping[str, str]
    min_pixels: int | None = None

    def files(
        self,
        folder: Path,
        rows: Sequence[TableRow],
        benchmark: str,
        questions: Sequence[BenchmarkQuestion],
    ) -> list[AnswerFile]:
        """Returns the answer file of each row.

        Args:
            folder: folder with one folder per benchmark.
            rows: rows of the table.
            benchmark: name of the benchmark.
            questions: all its questions.

        Returns:
            The files.

        Raises:
            ValueError: two rows would have the same file.
        """
        digest, files, owners = questions_digest(questions), [], {}
        for row in rows:
            provenance = self._provenance(row, benchmark, digest, len(questions))
            file = AnswerFile.of(folder, provenance)
            other = owners.setdefault(file.path, row)
            if other is not row:
                raise ValueError(
                    f"{file.path} would hold the answers of {other.label!r} at {other.budget} and "
                    f"of {row.label!r} at {row.budget}: remove one budget, or give the row "
                    "another name"
                )
            files.append(file)
        return files

    def _provenance(self, row: TableRow, benchmark: str, questions: str, asked: int) -> Provenance:
        """Returns everything that determines the answers of a row."""
        made = {
            "weights": self.weights,
            "dtype": self.dtype,
            "positions": self.settings.positions,
            "max_new_tokens": self.settings.longest_answer(BENCHMARKS[benchmark]),
        }
        if row.policy is not None:
            made["policy"] = self.policies[row.policy]
        pruner = row.method.pruner
        hidden = ("budget", "config")
        for field in dataclasses.fields(pruner):
            if field.name not in hidden:
                made[field.name] = getattr(pruner, field.name)
        if pruner.version > 1:
            made["version"] = pruner.version
        if self.min_pixels is not None:
            made["min_pixels"] = self.min_pixels
        if row.budget.kind == "rate":
            made["share"] = str(row.budget)
        return Provenance(
            benchmark=benchmark,
            questions=questions,
            asked=asked,
            method=row.label,
            mode=row.mode,
            budget=row.count(self.num_tokens),
            num_tokens=self.num_tokens,
            stop_bias=row.stop_bias,
            model=self.model,
            made=made,
        )


def policy_digest(policy: Policy) -> str:
    """Fingerprints everything that determines a policy's choices, except the stop bias."""
    digest = hashlib.sha256(repr(policy.config).encode())
    leaves: list[Any] = jax.tree_util.tree_leaves_with_path((policy.params, policy.stats))
    for path, leaf in leaves:
        digest.update(jax.tree_util.keystr(path).encode())
        digest.update(np.asarray(leaf).tobytes())
    return digest.hexdigest()[:16]
