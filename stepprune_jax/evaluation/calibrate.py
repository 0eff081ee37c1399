"""Computes the stop biases with which a policy meets each budget on average, and caches them.

A policy selects tokens one by one until its stop logit exceeds the logits of all remaining tokens.
The mean number of selected tokens follows from training. To meet another mean, a constant, the stop
bias, is added to the stop logit. The bias is calibrated on questions without their answers: on the
validation split of a data folder, or on the same number of questions of each public benchmark.
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
Biases = Mapping[str, Mapping[int | str, float]]  # stop bias by label of the policy and budget


class CalibrationSet(NamedTuple):
    """Questions with an image for computing stop biases.

    Attributes:
        identity: fields that identify the questions in the file of biases.
        questions: the questions.
        decimals: biases are rounded to this number of decimals; None does not round. An unrounded
            bias is minus the stop margin of some step of some question. Floating-point errors then
            decide whether this question stops at the step, so its count depends on the batch size.
    """

    identity: Mapping[str, str]
    questions: Sequence[Question | BenchmarkQuestion]
    decimals: int | None = None


class Margins(NamedTuple):
    """Stop margins of rollouts that do not stop.

    The margin of a step is the stop logit minus the largest logit of a token. With a stop bias, the
    rollout ends before the first step at which margin + bias > 0.

    Attributes:
        margin: [q, t] margin of each step t of each question q; infinite after the last step of a
            question.
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
        digests: digest of each policy by label.
        budgets: budgets that need a bias.
    """

    path: Path
    model: JsonObject
    digests: Mapping[str, str]
    budgets: Sequence[int | str]

    def read_cached(self, sample: CalibrationSet) -> Biases:
        """Reads the cached biases by label and budget.

        Args:
            sample: the questions that the biases must have been calibrated on.

        Returns:
            The biases. A label is omitted unless all of its budgets have a bias.
        """
        records, cached_biases = self._read_records(), {}
        for label in self.digests:
            biases = self._find_record(records, label, sample)["biases"]
            if {str(budget) for budget in self.budgets} <= biases.keys():
                cached_biases[label] = {budget: biases[str(budget)] for budget in self.budgets}
        return cached_biases

    def compute(
        self,
        model: VLM,
        policies: Mapping[str, Policy],
        sample: CalibrationSet,
        execution: Execution,
        batch_size: int,
    ) -> Biases:
        """Computes the missing biases, adds them to the file, and returns all biases.

        The main process computes and writes the biases. The other processes then read them.

        Args:
            model: the model.
            policies: the policies by label.
            sample: questions to calibrate on.
            execution: execution options of the model's layers.
            batch_size: questions per batch.

        Returns:
            The biases by label and budget.
        """

        def compute_missing() -> Biases:
            records = self._read_records()
            for label in self.digests if distributed.is_main() else ():
                record = self._find_record(records, label, sample)
                budgets = [b for b in self.budgets if str(b) not in record["biases"]]
                if not budgets:
                    continue
                policy = policies[label]
                margins = stop_margins(model, policy, sample.questions, execution, batch_size)
                for budget in budgets:
                    parsed = Budget.parse(budget)
                    counts = [parsed.exact_count(int(size)) for size in margins.sizes]
                    bias = stop_bias_for(policy, margins.margin, np.mean(counts))
                    if sample.decimals is not None:
                        bias = round(bias, sample.decimals)
                    record["biases"][str(budget)] = bias
                record["questions"] = len(sample.questions)
                if record not in records.setdefault(label, []):
                    records[label].append(record)
                self.path.parent.mkdir(parents=True, exist_ok=True)
                write_json(self.path, records)
            return self.read_cached(sample)

        return distributed.main_first(compute_missing) if self.digests else {}

    def _read_records(self) -> dict[str, list[JsonObject]]:
        """Reads the file: by label, one record for each policy, model and sample."""
        return read_json_object(self.path) if self.path.is_file() else {}

    def _find_record(
        self, records: Mapping[str, list[JsonObject]], label: str, sample: CalibrationSet
    ) -> JsonObject:
        """Returns the record of a policy with this model and sample.

        Args:
            records: content of the file, from `_read_records`.
            label: label of the policy.
            sample: the questions that the biases must have been calibrated on.

        Returns:
            The record in `records`, or a new record without biases that is not in `records`.
        """
        identity = {"policy": self.digests[label], **self.model, **sample.identity}
        for record in records.get(label, []):
            # Further fields of a record are results, not part of its identity.
            if {key: record[key] for key in record.keys() - {"biases", "questions"}} == identity:
                return record
        return {**identity, "biases": {}}


def sample_evenly(
    questions_of: Mapping[str, Sequence[BenchmarkQuestion]], question_limit: int
) -> list[BenchmarkQuestion]:
    """Samples questions with an image at regular intervals, the same number per benchmark.

    Args:
        questions_of: questions by benchmark.
        question_limit: maximum number of questions in total; 0 selects all questions.

    Returns:
        The sampled questions, grouped by benchmark. Each benchmark has at least one, even if
        `question_limit` is smaller than the number of benchmarks.

    Raises:
        UserError: no question has an image.
    """
    limit_per_benchmark = max(1, question_limit // len(questions_of)) if question_limit else 0
    sampled_questions = []
    for questions in questions_of.values():
        with_image = [question for question in questions if question.image is not None]
        sampled_questions += [
            with_image[index] for index in spread_over(len(with_image), limit_per_benchmark)
        ]
    if not sampled_questions:
        raise UserError(f"no question of {', '.join(questions_of)} has an image for stop biases")
    return sampled_questions


def stop_margins(
    model: VLM,
    policy: Policy,
    questions: Sequence[Question | BenchmarkQuestion],
    execution: Execution,
    batch_size: int,
) -> Margins:
    """Rolls out a policy on questions without stopping, and returns its stop margins.

    Args:
        model: the model that encodes the questions.
        policy: a policy with a learned stop.
        questions: questions with an image.
        execution: execution options of the model's layers.
        batch_size: questions per batch.

    Returns:
        The margins of all questions, in the order of `questions`.
    """
    pruner = place_pruner(model, policy)
    margin_chunks, image_sizes = [], []
    with tqdm(total=len(questions), desc="stop biases", unit="question", mininterval=1) as bar:
        for _, encoded in encode_chunks(
            model, questions, batch_size=batch_size, execution=execution
        ):
            max_tokens = model.config.max_image_tokens
            if encoded.images.clips is not None:
                max_tokens = max(max_tokens, int(encoded.images.sizes.max()))
            ranking, _ = rank_all(
                model,
                pruner,
                encoded.prompts,
                encoded.images,
                steps=pruner.longest(max_tokens),
                batch_size=batch_size,
            )
            margin_chunks.append(np.asarray(ranking.margin))
            image_sizes.append(encoded.sizes)
            bar.update(len(encoded.sizes))
    # A chunk of small images has fewer steps. An infinite margin is the end of a rollout.
    max_steps = max([margin.shape[1] for margin in margin_chunks], default=0)
    max_steps = max(max_steps, pruner.longest(model.config.max_image_tokens))
    margin_chunks = [
        np.pad(margin, ((0, 0), (0, max_steps - margin.shape[1])), constant_values=np.inf)
        for margin in margin_chunks
    ]
    return Margins(np.concatenate(margin_chunks), np.concatenate(image_sizes))


def calibrate_policy(
    model: VLM,
    policy: Policy,
    questions: Sequence[Question | BenchmarkQuestion],
    execution: Execution,
    batch_size: int,
) -> Policy:
    """Stores a calibration in a policy: the mean number of kept tokens at each stop bias.

    Also logs the number of tokens that the policy keeps without a bias. A warning follows if this
    is the minimum or maximum for most questions.

    Args:
        model: the model that encodes the questions.
        policy: a policy with a learned stop.
        questions: questions with an image, without answers.
        execution: execution options of the model's layers.
        batch_size: questions per batch.

    Returns:
        A copy of the policy with its calibration.
    """
    margins = stop_margins(model, policy, questions, execution, batch_size)
    if distributed.is_main():
        stop_bias = float(policy.stop_bias)
        log_stops(count_stops(margins.margin, margins.sizes, policy.min_tokens, stop_bias))
    calibration = calibrate(margins.margin, margins.sizes, policy.min_tokens)
    return policy.replace(calibration=calibration)


def stop_bias_for(
    policy: Policy, margin: Float[np.ndarray, "q t"], target_mean: float | np.floating
) -> float:
    """Computes the stop bias with which a policy keeps `target_mean` tokens on average.

    Args:
        policy: the policy.
        margin: [q, t] stop margins of the policy on q questions, as in `Margins.margin`.
        target_mean: mean number of tokens to keep.
    """
    margins = jnp.asarray(margin)
    # This bias stops every question at the minimum count, and its negative stops no question before
    # the last step. The search between the two biases therefore covers all counts.
    max_bias = float(jnp.max(jnp.abs(margins), where=jnp.isfinite(margins), initial=0)) + 1
    min_tokens = min(policy.min_tokens, margins.shape[1])
    bias = calibrate_stop_bias(margins, target_mean, min_tokens=min_tokens, max_bias=max_bias)
    return float(bias)
