"""The rows of a table of the public benchmarks: what is kept, by whom, and in which files."""

import hashlib
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

from stepprune_jax.benchmarks import BENCHMARKS
from stepprune_jax.benchmarks.answer_files import AnswerFile, Provenance, questions_digest
from stepprune_jax.benchmarks.questions import BenchmarkQuestion
from stepprune_jax.checkpoints.policy import Policy
from stepprune_jax.evaluation.names import ALL, CLS, DEFAULT, GRID, RANDOM, own_stop
from stepprune_jax.evaluation.orders import Ordering
from stepprune_jax.evaluation.rows import (
    Row,
    exact_row,
    stopped,
    untrained_row,
)
from stepprune_jax.evaluation.settings import Settings
from stepprune_jax.evaluation.split import Encoded
from stepprune_jax.models.llava.config import LlavaConfig


class Method(NamedTuple):
    """One row of the table, before any question is answered.

    Attributes:
        name: of the row.
        mode: "exact" (every picture keeps the budget) or "adaptive" (the policy stops).
        budget: tokens to keep, on average if adaptive; None for all, and for a policy's own stop.
        policy: name of the policy that chooses; None for a row without training.
        stop_bias: added to the stop logits of an adaptive row.
    """

    name: str
    mode: str
    budget: int | None
    policy: str | None = None
    stop_bias: float | None = None


class Making(NamedTuple):
    """What answers depend on besides row and question: for their cards.

    Attributes:
        model: its name.
        num_tokens: N.
        seed: of the random rows.
        settings: of the evaluation.
        policies: the fingerprint of each, by row name.
        weights: the model's fingerprint.
        dtype: of the model.
    """

    model: str
    num_tokens: int
    seed: int
    settings: Settings
    policies: Mapping[str, str]
    weights: str
    dtype: str

    def files(
        self,
        folder: Path,
        methods: Sequence[Method],
        name: str,
        questions: Sequence[BenchmarkQuestion],
    ) -> list[AnswerFile]:
        """The answer file of each row.

        Args:
            folder: with a folder for each benchmark.
            methods: the rows.
            name: of the benchmark.
            questions: all of it.

        Raises:
            ValueError: two rows would have the same file.
        """
        digest, files, owners = questions_digest(questions), [], {}
        for method in methods:
            file = AnswerFile.of(folder, self._provenance(method, name, digest, len(questions)))
            other = owners.setdefault(file.path, method)
            if other != method:
                raise ValueError(
                    f"{file.path} would hold the answers of {_named(other)} and of "
                    f"{_named(method)}: leave out one budget, or give the row another name"
                )
            files.append(file)
        return files

    def _provenance(self, method: Method, name: str, questions: str, asked: int) -> Provenance:
        """All that the answers of a row depend on."""
        made = {
            "weights": self.weights, "dtype": self.dtype, "positions": self.settings.positions,
            "max_new_tokens": self.settings.longest_answer(BENCHMARKS[name]),
        }  # fmt: skip
        if method.policy is not None:
            made["policy"] = self.policies[method.policy]
        if method.name == RANDOM:
            made["seed"] = self.seed
        return Provenance(
            benchmark=name, questions=questions, asked=asked, method=method.name,
            mode=method.mode, budget=self.num_tokens if method.name == ALL else method.budget,
            num_tokens=self.num_tokens, stop_bias=method.stop_bias, model=self.model, made=made,
        )  # fmt: skip


def _named(method: Method) -> str:
    """A row for messages."""
    return f"{method.name!r} at {method.budget}" if method.budget else repr(method.name)


def plan(
    settings: Settings,
    policies: Collection[str],
    biases: Mapping[str, Mapping[int, float]],
) -> list[Method]:
    """The rows in the order of the table.

    Args:
        settings: with budgets and methods.
        policies: names of their rows.
        biases: for each policy that stops by itself, a stop bias for each budget.
    """
    rows = [Method(ALL, "exact", None)]
    rows += [
        Method(name, "exact", budget) for name in (RANDOM, GRID, CLS) for budget in settings.budgets
    ]
    for name in policies:
        rows += [Method(name, "exact", budget, name) for budget in settings.budgets]
        if name in biases:
            rows += [
                Method(name, "adaptive", budget, name, biases[name][budget])
                for budget in settings.budgets
            ]
            if name == DEFAULT:
                rows.append(Method(own_stop(name), "adaptive", None, name, 0.0))
    return [row for row in rows if settings.wants(row.policy or row.name)]


def make_row(
    method: Method,
    split: Encoded,
    config: LlavaConfig,
    policies: Mapping[str, Policy],
    orders: Mapping[str, Ordering],
    drawn: np.ndarray,
) -> Row:
    """What a method keeps of each question's picture.

    Args:
        method: which one.
        split: the questions.
        config: the model's.
        policies: by row name.
        orders: of each policy, on these questions.
        drawn: [q, n] a random order of each question's tokens.
    """
    if method.policy is None:
        return untrained_row(method.name, split, config, method.budget or 0, drawn)
    found, n = orders[method.policy], split.features.shape[1]
    if method.mode == "exact":
        row = exact_row(method.name, found.order, method.budget, n)
    else:
        kept = stopped(found, policies[method.policy], method.stop_bias)
        row = Row(method.name, "adaptive", method.budget, n, kept, method.stop_bias)
    return row._replace(seconds=found.seconds)


def random_orders(seed: int, numbers: Sequence[int], num_tokens: int) -> np.ndarray:
    """A random order of the tokens for each question, whichever others are asked with it.

    Args:
        seed: of the row.
        numbers: places of the questions in their list.
        num_tokens: N.

    Returns:
        [q, n] int32 permutations.
    """
    rows = [np.random.default_rng((seed, number)).permutation(num_tokens) for number in numbers]
    return np.array(rows, np.int32)


def policy_digest(policy: Policy) -> str:
    """A fingerprint of all that a policy's choices depend on, but for the stop bias."""
    found = hashlib.sha256(repr(policy.config).encode())
    leaves: list[Any] = jax.tree_util.tree_leaves_with_path((policy.params, policy.stats))
    for path, leaf in leaves:
        found.update(jax.tree_util.keystr(path).encode())
        found.update(np.asarray(leaf).tobytes())
    return found.hexdigest()[:16]
