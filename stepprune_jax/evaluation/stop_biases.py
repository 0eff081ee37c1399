"""Stop biases at which a policy meets each budget on average, found once and kept in a file.

A policy's own stop gives one mean K. The number that is added to its stop logits for another one is
found on questions of the benchmarks themselves, as many of each, without their answers; it is the
same for all benchmarks, so that K may differ between them.
"""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from stepprune_jax import distributed
from stepprune_jax.checkpoints.load import VLM
from stepprune_jax.checkpoints.policy import Policy
from stepprune_jax.evaluation.benchmarks.questions import Asked
from stepprune_jax.evaluation.measure import stops
from stepprune_jax.evaluation.methods import policy_digest
from stepprune_jax.evaluation.orders import trained_order
from stepprune_jax.evaluation.progress import Progress
from stepprune_jax.evaluation.records import write_json
from stepprune_jax.evaluation.rows import stop_biases
from stepprune_jax.evaluation.settings import Settings
from stepprune_jax.evaluation.split import encode_split

FILE = "stop_biases.json"
# Questions that share a pass through the tower.
_CHUNK = 256


def find_biases(
    folder: Path,
    model: VLM,
    policies: Mapping[str, Policy],
    asked: Mapping[str, Sequence[Asked]],
    settings: Settings,
    *,
    weights: str,
    attention: str,
    sizes: Sequence[int],
) -> dict[str, dict[int, float]]:
    """The stop biases of every policy that stops by itself.

    Those in folder/stop_biases.json that were found for the same policy and model are taken from
    there, so that a run that goes on, or answers another benchmark, uses the same.

    Args:
        folder: of the answers.
        model: the frozen model.
        policies: by row name.
        asked: the questions of each benchmark.
        settings: with budgets and the number of questions to look at.
        weights: `model_identity` of the model.
        attention: "matmul", "xla" or "cudnn".
        sizes: widths of prompts and of the user's words.

    Returns:
        Row name to budget to bias.
    """
    path = folder / FILE

    def find() -> dict[str, dict[int, float]]:
        known = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
        found = {}
        for name, policy in policies.items():
            if not stops(name, policy, settings):
                continue
            about = {"policy": policy_digest(policy), "weights": weights}
            entry = known.get(name, {})
            biases = entry.get("biases", {}) if about.items() <= entry.items() else {}
            missing = [budget for budget in settings.budgets if str(budget) not in biases]
            if missing:
                chosen = _spread(asked, settings.validation_questions)
                margin = _margins(name, model, policy, chosen, settings, attention, sizes)
                new = stop_biases(policy, margin, missing)
                # Rounded: the exact number is the margin of some question, whose K would then
                # depend on the last bit of a sum, and so on the size of the batch.
                biases |= {str(b): round(bias, 3) for b, bias in zip(missing, new, strict=True)}
                known[name] = {**about, "questions": len(chosen), "benchmarks": list(asked)}
                known[name]["biases"] = biases
                folder.mkdir(parents=True, exist_ok=True)
                write_json(path, known)
            found[name] = {budget: biases[str(budget)] for budget in settings.budgets}
        return found

    return distributed.main_first(find)


def _spread(asked: Mapping[str, Sequence[Asked]], most: int) -> list[Asked]:
    """Questions with a picture, as many of each benchmark, spread evenly over it."""
    chosen = []
    for questions in asked.values():
        shown = [question for question in questions if question.image is not None]
        count = min(len(shown), max(1, most // len(asked))) if most else len(shown)
        chosen += [shown[number * len(shown) // count] for number in range(count)]
    return chosen


def _margins(
    name: str,
    model: VLM,
    policy: Policy,
    questions: Sequence[Asked],
    settings: Settings,
    attention: str,
    sizes: Sequence[int],
) -> np.ndarray:
    """Stop margins [q, T] of a rollout on each question."""
    steps, size = policy.config.steps(model.config.num_image_tokens), settings.batch_size
    progress, margins = Progress(len(questions)), []
    report = progress.task(f"stop biases, {name}", len(questions), len(questions))
    for first in range(0, len(questions), _CHUNK):
        part = questions[first : first + _CHUNK]
        encoded = encode_split(model, part, batch_size=size, attention=attention, sizes=sizes)
        found = trained_order(model, policy, encoded, steps=steps, batch_size=size)
        margins.append(found.margin)
        report(first + len(part))
    progress.close()
    return np.concatenate(margins)
