"""Stop biases at which a policy meets each budget on average, computed once and cached in a file.

A policy's own stop gives one mean K. For another mean, a bias is added to its stop logits, computed
on questions without reading their answers: those of the validation split if there is one, otherwise
some of the benchmarks' own, the same number of each.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jaxtyping import Float, Int

from stepprune_jax.benchmarks.questions import BenchmarkQuestion
from stepprune_jax.checkpoints.load import VLM
from stepprune_jax.data.json_files import read_json_object, write_json
from stepprune_jax.data.llava import Question
from stepprune_jax.evaluation.encode import encode_chunks
from stepprune_jax.evaluation.progress import Progress
from stepprune_jax.evaluation.split import spread_over
from stepprune_jax.inference.pipeline import place_method
from stepprune_jax.inference.sets import rank_all
from stepprune_jax.models.stack import Execution
from stepprune_jax.parallel import distributed
from stepprune_jax.policy import calibrate_stop_bias
from stepprune_jax.pruning import Budget, Policy, make_method
from stepprune_jax.pruning.calibration import calibrate
from stepprune_jax.settings import is_number

FILE = "stop_biases.json"
# Entries of each row: one for every policy that the row has had.
_Entries = dict[str, list[dict[str, Any]]]


class Sample(NamedTuple):
    """Questions that biases are computed on.

    Attributes:
        about: identification of the sample in the file: JSON values by name.
        questions: questions with an image each.
        decimals: decimals to which biases are rounded; None for exact ones. An exact bias is the
            margin of some question, whose K then depends on the last bit of a sum, and so on the
            batch size.
    """

    about: Mapping[str, Any]
    questions: Sequence[Question | BenchmarkQuestion]
    decimals: int | None = None


class Margins(NamedTuple):
    """Stop margins of rollouts that do not stop, on some questions.

    Attributes:
        margin: [q, t] stop margins before each step; infinite where no token may be chosen.
        sizes: [q] tokens of each question's image.
    """

    margin: Float[np.ndarray, "q t"]
    sizes: Int[np.ndarray, "q"]


class StopBiases:
    """The stop biases of a run's policies, in a file in its answers' folder.

    Entries of other policies, models or samples remain in the file.
    """

    def __init__(
        self,
        folder: Path,
        weights: str,
        policies: Mapping[str, str],
        budgets: Sequence[int | str],
    ):
        """Names the file.

        Args:
            folder: folder of the answers.
            weights: the model's fingerprint.
            policies: the fingerprint of each policy that stops by itself, by row name.
            budgets: mean numbers of tokens, or shares of the images' tokens.
        """
        self._path, self._weights = folder / FILE, weights
        self._policies, self._budgets = policies, budgets

    def known(self, about: Mapping[str, Any]) -> dict[str, dict[int | str, float]]:
        """Reads the biases of rows that have one for every budget.

        Args:
            about: identification of the sample.

        Returns:
            Row name to budget to bias.

        Raises:
            ValueError: the file does not hold stop biases.
        """
        entries = self._read()
        known = {name: self._entry(entries, name, about)["biases"] for name in self._policies}
        return {
            name: {budget: biases[str(budget)] for budget in self._budgets}
            for name, biases in known.items()
            if {str(budget) for budget in self._budgets} <= biases.keys()
        }

    def compute(
        self,
        model: VLM,
        policies: Mapping[str, Policy],
        sample: Sample,
        execution: Execution,
        size: int,
    ) -> dict[str, dict[int | str, float]]:
        """Computes the biases that are missing.

        Args:
            model: the frozen model.
            policies: by row name.
            sample: questions.
            execution: how the layers of the model are run.
            size: questions per batch.

        Returns:
            Biases by row name and budget, for every policy that stops by itself.

        Raises:
            ValueError: the file does not hold stop biases, or the sample is empty.
        """

        def run() -> dict[str, dict[int | str, float]]:
            entries = self._read()
            for name in self._policies:
                entry = self._entry(entries, name, sample.about)
                missing = [b for b in self._budgets if str(b) not in entry["biases"]]
                if not missing or not distributed.is_main():
                    continue
                margins = stop_margins(name, model, policies[name], sample, execution, size)
                biases = stop_biases(policies[name], margins, missing)
                if sample.decimals is not None:
                    biases = [round(bias, sample.decimals) for bias in biases]
                entry["biases"] |= {str(b): v for b, v in zip(missing, biases, strict=True)}
                entry["questions"] = len(sample.questions)
                if entry not in entries.setdefault(name, []):
                    entries[name].append(entry)
                self._path.parent.mkdir(parents=True, exist_ok=True)
                write_json(self._path, entries)
            return self.known(sample.about)

        return distributed.main_first(run) if self._policies else {}

    def _read(self) -> _Entries:
        """Reads the file; empty if there is none."""
        entries = read_json_object(self._path) if self._path.is_file() else {}
        for name, known in entries.items():
            good = isinstance(known, list) and all(
                isinstance(e, dict)
                and isinstance(e.get("biases"), dict)
                and all(map(is_number, e["biases"].values()))
                for e in known
            )
            if not good:
                raise ValueError(
                    f"{self._path}: {name!r} is not a list of stop biases; move the file away"
                )
        return entries

    def _entry(self, entries: _Entries, name: str, about: Mapping[str, Any]) -> dict[str, Any]:
        """Returns the entry of a row's policy with this model and sample, or a new one."""
        mine = {"policy": self._policies[name], "weights": self._weights, **about}
        for entry in entries.get(name, []):
            if mine.items() <= entry.items() and entry.get("split") == mine.get("split"):
                return entry
        return {**mine, "biases": {}}


def spread(asked: Mapping[str, Sequence[BenchmarkQuestion]], most: int) -> list[BenchmarkQuestion]:
    """Chooses questions with an image, the same number of each benchmark, spread evenly.

    Args:
        asked: the questions of each benchmark.
        most: number of questions to choose; 0 for all.

    Returns:
        The questions.

    Raises:
        ValueError: no question has an image.
    """
    chosen = []
    for questions in asked.values():
        shown = [question for question in questions if question.image is not None]
        each = max(1, most // len(asked)) if most else 0
        chosen += [shown[at] for at in spread_over(len(shown), each)]
    if not chosen:
        raise ValueError(f"no question of {', '.join(asked)} has an image for stop biases")
    return chosen


def stop_margins(
    name: str, model: VLM, policy: Policy, sample: Sample, execution: Execution, size: int
) -> Margins:
    """Rolls a policy out on each question of a sample.

    Args:
        name: name of the row, for progress.
        model: the frozen model.
        policy: a StepPrune policy.
        sample: the questions.
        execution: how the layers of the model are run.
        size: questions per batch.

    Returns:
        Its stop margins.
    """
    method = place_method(model, make_method(policy=policy))
    steps = method.pruner.most(model.config.max_image_tokens)
    questions, progress = sample.questions, Progress(len(sample.questions))
    parts, sizes = [], []
    report = progress.task(f"stop biases, {name}", len(questions))
    for first, encoded in encode_chunks(model, questions, batch_size=size, execution=execution):
        ranking, _ = rank_all(
            model, method, encoded.prompts, encoded.images, steps=steps, batch_size=size
        )
        own = encoded.sizes
        longest = np.array([min(size, method.pruner.most(int(size))) for size in own])
        reached = np.arange(ranking.margin.shape[1]) < longest[:, None]
        margin = np.full((len(own), steps), np.inf, ranking.margin.dtype)
        margin[:, : reached.shape[1]] = np.where(reached, ranking.margin, np.inf)
        parts.append(margin)
        sizes.append(own)
        report(first + len(own))
    progress.close()
    return Margins(np.concatenate(parts), np.concatenate(sizes))


def calibrate_policy(
    model: VLM,
    policy: Policy,
    questions: Sequence[Question | BenchmarkQuestion],
    execution: Execution,
    size: int,
) -> Policy:
    """Measures the mean counts of stop biases, without answering.

    Args:
        model: the frozen model.
        policy: a StepPrune policy.
        questions: each with an image.
        execution: how the layers of the model are run.
        size: questions per batch.

    Returns:
        The policy with its calibration.

    Raises:
        ValueError: a question without an image, or an image that cannot be read.
    """
    sample = Sample({}, questions)
    margins = stop_margins("calibration", model, policy, sample, execution, size)
    table = calibrate(margins.margin, margins.sizes, policy.pruner.least)
    return policy.replace(calibration=table)


def stop_biases(policy: Policy, margins: Margins, budgets: Sequence[int | str]) -> list[float]:
    """Computes the stop biases at which a policy meets budgets on average.

    Args:
        policy: a StepPrune policy.
        margins: result of `stop_margins`.
        budgets: mean numbers of tokens, or shares of the images' tokens, as read by `Budget.parse`.

    Returns:
        A bias for each budget.
    """
    least = min(policy.pruner.least, margins.margin.shape[1])
    margin = jnp.asarray(margins.margin)
    bound = float(jnp.max(jnp.abs(margin), where=jnp.isfinite(margin), initial=0)) + 1
    means = [
        np.mean([Budget.parse(budget).count(int(size)) for size in margins.sizes])
        for budget in budgets
    ]
    return [
        float(calibrate_stop_bias(margin, mean, min_tokens=least, max_bias=bound)) for mean in means
    ]
