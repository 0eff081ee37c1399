"""Stop biases at which a policy meets each budget on average, computed once and cached in a file.

A learned stop has one mean count. For another mean count, a bias is added to the stop logits. The
bias is computed on questions without their answers: on the validation split of a data folder, or on
the same number of questions from each public benchmark.
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
    """Questions on which stop biases are computed; each has an image.

    Attributes:
        about: fields that identify the questions in the file of biases.
        questions: the questions.
        decimals: decimals of the biases; None leaves them exact. An exact bias equals the margin of
            some question, so the count of that question depends on the last bit of a sum, and thus
            on the batch size.
    """

    about: Mapping[str, str]
    questions: Sequence[Question | BenchmarkQuestion]
    decimals: int | None = None


class Margins(NamedTuple):
    """Stop margins before each step of rollouts without a stop; infinite past the end."""

    margin: Float[np.ndarray, "q t"]
    sizes: Int[np.ndarray, "q"]


class StopBiases(NamedTuple):
    """The file of stop biases of all policies with a learned stop.

    The file also keeps the biases of earlier policies and models.

    Attributes:
        path: the file.
        model: fields that identify the model.
        digests: fingerprint of each policy, by row name.
        budgets: budgets that need a bias.
    """

    path: Path
    model: JsonObject
    digests: Mapping[str, str]
    budgets: Sequence[int | str]

    def known(self, sample: CalibrationSet) -> Biases:
        """Returns the biases of rows that have one for every budget, by row name and budget."""
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
        """Computes the biases that are missing, `size` questions per batch; returns all."""

        def run() -> Biases:
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

        return distributed.main_first(run) if self.digests else {}

    def _read(self) -> dict[str, list[JsonObject]]:
        """Reads the entries of each row: one for every policy, model and sample that it has had."""
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
    """Chooses questions with an image, spread over the benchmarks; a limit of 0 keeps all."""
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
    """Rolls a policy out on questions with an image each, `size` of them per batch."""
    pruner = place_pruner(model, policy)
    steps = pruner.longest(model.config.max_image_tokens)
    parts, sizes = [], []
    with tqdm(total=len(questions), desc="stop biases", unit="question", mininterval=1) as bar:
        for _, encoded in encode_chunks(model, questions, batch_size=size, execution=execution):
            ranking, _ = rank_all(
                model, pruner, encoded.prompts, encoded.images, steps=steps, batch_size=size
            )
            missing = steps - ranking.margin.shape[1]
            parts.append(np.pad(ranking.margin, ((0, 0), (0, missing)), constant_values=np.inf))
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
    """Returns a policy with the mean counts of its stop biases, measured without answering.

    Also logs what its learned stop keeps by itself, with a warning where it sits at a bound.
    """
    margins = stop_margins(model, policy, questions, execution, size)
    if distributed.is_main():
        bias = float(policy.stop_bias)
        log_stops(count_stops(margins.margin, margins.sizes, policy.min_tokens, bias))
    table = calibrate(margins.margin, margins.sizes, policy.min_tokens)
    return policy.replace(calibration=table)


def stop_biases(policy: Policy, margins: Margins, budgets: Sequence[int | str]) -> list[float]:
    """Computes the stop biases at which a policy meets budgets, as `Budget.parse` reads them."""
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
