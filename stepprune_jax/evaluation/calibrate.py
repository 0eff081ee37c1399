"""Computes the stop biases with which a policy meets each budget on average, and caches them.

A learned stop keeps some number of tokens on average. For another mean, a bias is added to the stop
logits. The bias is computed on questions without their answers: on the validation split of a data
folder, or on equally many questions of each public benchmark.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jaxtyping import Float, Int
from tqdm import tqdm

from stepprune_jax.benchmarks import BenchmarkQuestion
from stepprune_jax.checkpoints.load import VLM
from stepprune_jax.data.json_files import JsonObject, read_json_object, write_json
from stepprune_jax.data.llava import Question
from stepprune_jax.evaluation.split import spread_over
from stepprune_jax.inference.dataset import rank_all
from stepprune_jax.inference.encode import encode_chunks
from stepprune_jax.inference.pipeline import place_pruner
from stepprune_jax.models.stack import Execution
from stepprune_jax.parallel import distributed
from stepprune_jax.policy import calibrate_stop_bias
from stepprune_jax.pruning import Budget
from stepprune_jax.selectors import Policy
from stepprune_jax.selectors.calibration import calibrate, count_stops, log_stops
from stepprune_jax.user_input import UserError

FILE = "stop_biases.json"
Biases = Mapping[str, Mapping[int | str, float]]  # by row name and budget


class CalibrationSet(NamedTuple):
    """Questions with an image for computing stop biases.

    Attributes:
        about: fields that identify the questions in the file of biases.
        questions: the questions.
        decimals: number of decimals of the biases; None leaves them exact. An exact bias equals the
            margin of some question. The count of that question then depends on the last bit of a
            sum, and therefore on the batch size.
    """

    about: Mapping[str, str]
    questions: Sequence[Question | BenchmarkQuestion]
    decimals: int | None = None


class Margins(NamedTuple):
    """Stop margins of rollouts that ignore the learned stop.

    The margin of a step is the stop bias that would end the rollout before this step.

    Attributes:
        margin: [q, t] margin of each step of each question; infinite after the last step.
        sizes: [q] number of visual tokens of each question's image.
    """

    margin: Float[np.ndarray, "q t"]
    sizes: Int[np.ndarray, "q"]


class StopBiases(NamedTuple):
    """The cached stop biases of all policies with a learned stop.

    The file also keeps the biases of earlier policies and models.

    Attributes:
        path: the file.
        model: fields that identify the model.
        digests: digest of each policy by row name.
        budgets: budgets that need a bias.
    """

    path: Path
    model: JsonObject
    digests: Mapping[str, str]
    budgets: Sequence[int | str]

    def known(self, sample: CalibrationSet) -> Biases:
        """Returns the cached biases by row name and budget.

        A row without a bias for each budget is omitted.
        """
        entries = self._read()
        biases_of = {name: self._entry(entries, name, sample)["biases"] for name in self.digests}
        return {
            name: {budget: biases[str(budget)] for budget in self.budgets}
            for name, biases in biases_of.items()
            if {str(budget) for budget in self.budgets} <= biases.keys()
        }

    def compute(
        self,
        model: VLM,
        policies: Mapping[str, Policy],
        sample: CalibrationSet,
        execution: Execution,
        size: int,
    ) -> Biases:
        """Computes the missing biases, and returns all biases by row name and budget.

        Args:
            model: the model.
            policies: the policies by row name.
            sample: questions for the computation.
            execution: execution options of the model's layers.
            size: questions per batch.
        """

        def compute_missing() -> Biases:
            entries = self._read()
            for name in self.digests if distributed.is_main() else ():
                entry = self._entry(entries, name, sample)
                missing = [b for b in self.budgets if str(b) not in entry["biases"]]
                if not missing:
                    continue
                margins = stop_margins(model, policies[name], sample.questions, execution, size)
                biases = stop_biases(policies[name], margins, missing)
                if sample.decimals is not None:
                    biases = [round(bias, sample.decimals) for bias in biases]
                entry["biases"] |= {str(b): v for b, v in zip(missing, biases, strict=True)}
                entry["questions"] = len(sample.questions)
                if entry not in entries.setdefault(name, []):
                    entries[name].append(entry)
                self.path.parent.mkdir(parents=True, exist_ok=True)
                write_json(self.path, entries)
            return self.known(sample)

        return distributed.main_first(compute_missing) if self.digests else {}

    def _read(self) -> dict[str, list[JsonObject]]:
        """Reads the entries by row name: one entry for each policy, model and sample."""
        return read_json_object(self.path) if self.path.is_file() else {}

    def _entry(
        self, entries: Mapping[str, list[JsonObject]], name: str, sample: CalibrationSet
    ) -> JsonObject:
        """Returns the entry of a row's policy with this model and sample, or a new one."""
        identity = {"policy": self.digests[name], **self.model, **sample.about}
        for entry in entries.get(name, []):
            if {key: entry[key] for key in entry if key not in ("biases", "questions")} == identity:
                return entry
        return {**identity, "biases": {}}


def spread(
    questions_of: Mapping[str, Sequence[BenchmarkQuestion]], question_limit: int
) -> list[BenchmarkQuestion]:
    """Chooses questions with an image, the same number from each benchmark.

    Args:
        questions_of: questions by benchmark.
        question_limit: largest number of questions in total; 0 keeps all of them.

    Raises:
        ValueError: no question has an image.
    """
    chosen = []
    for questions in questions_of.values():
        with_image = [question for question in questions if question.image is not None]
        limit_per_benchmark = max(1, question_limit // len(questions_of)) if question_limit else 0
        chosen += [
            with_image[position] for position in spread_over(len(with_image), limit_per_benchmark)
        ]
    if not chosen:
        raise UserError(f"no question of {', '.join(questions_of)} has an image for stop biases")
    return chosen


def stop_margins(
    model: VLM,
    policy: Policy,
    questions: Sequence[Question | BenchmarkQuestion],
    execution: Execution,
    size: int,
) -> Margins:
    """Rolls out a policy on questions and returns its stop margins.

    Args:
        model: the model.
        policy: a policy with a learned stop.
        questions: questions with an image.
        execution: execution options of the model's layers.
        size: questions per batch.
    """
    pruner = place_pruner(model, policy)
    steps = pruner.longest(model.config.max_image_tokens)
    parts, sizes = [], []
    with tqdm(total=len(questions), desc="stop biases", unit="question", mininterval=1) as bar:
        for _, encoded in encode_chunks(model, questions, batch_size=size, execution=execution):
            ranking, _ = rank_all(
                model, pruner, encoded.prompts, encoded.images, steps=steps, batch_size=size
            )
            padding = steps - ranking.margin.shape[1]
            parts.append(np.pad(ranking.margin, ((0, 0), (0, padding)), constant_values=np.inf))
            sizes.append(encoded.sizes)
            bar.update(len(encoded.sizes))
    return Margins(np.concatenate(parts), np.concatenate(sizes))


def calibrate_policy(
    model: VLM,
    policy: Policy,
    questions: Sequence[Question | BenchmarkQuestion],
    execution: Execution,
    size: int,
) -> Policy:
    """Measures the mean count of each stop bias, and returns the policy with this calibration.

    Also logs the counts of the learned stop without a bias, with a warning if most are at a bound.

    Args:
        model: the model.
        policy: a policy with a learned stop.
        questions: questions with an image. They are not answered.
        execution: execution options of the model's layers.
        size: questions per batch.
    """
    margins = stop_margins(model, policy, questions, execution, size)
    if distributed.is_main():
        bias = float(policy.stop_bias)
        log_stops(count_stops(margins.margin, margins.sizes, policy.min_tokens, bias))
    table = calibrate(margins.margin, margins.sizes, policy.min_tokens)
    return policy.replace(calibration=table)


def stop_biases(policy: Policy, margins: Margins, budgets: Sequence[int | str]) -> list[float]:
    """Computes the stop bias with which a policy meets each budget on average.

    Args:
        policy: the policy.
        margins: its stop margins on the calibration questions.
        budgets: budgets as in `Budget.parse`.

    Returns:
        One bias per budget.
    """
    min_tokens = min(policy.min_tokens, margins.margin.shape[1])
    margin = jnp.asarray(margins.margin)
    max_bias = float(jnp.max(jnp.abs(margin), where=jnp.isfinite(margin), initial=0)) + 1
    means = [
        np.mean([Budget.parse(budget).count(int(size)) for size in margins.sizes])
        for budget in budgets
    ]
    return [
        float(calibrate_stop_bias(margin, mean, min_tokens=min_tokens, max_bias=max_bias))
        for mean in means
    ]
