"""Stop biases at which a policy meets each budget on average, found once and kept in a file.

A policy's own stop gives one mean K. The number that is added to its stop logits for another one is
found on questions of the benchmarks themselves, as many of each, without their answers; it is the
same for all benchmarks, so that K may differ between them.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from stepprune_jax.benchmarks.questions import BenchmarkQuestion
from stepprune_jax.checkpoints.load import VLM
from stepprune_jax.checkpoints.policy import Policy
from stepprune_jax.data.json_files import read_json_object, write_json
from stepprune_jax.evaluation.measure import stops
from stepprune_jax.evaluation.methods import Making
from stepprune_jax.evaluation.orders import trained_order
from stepprune_jax.evaluation.progress import Progress
from stepprune_jax.evaluation.rows import stop_biases
from stepprune_jax.evaluation.split import encode_split
from stepprune_jax.parallel import distributed

FILE = "stop_biases.json"
# Questions that share a pass through the tower.
_CHUNK = 256
# Row name to what was found for each policy that the row has had.
_Entries = dict[str, list[dict[str, Any]]]


def known_biases(folder: Path, making: Making) -> dict[str, dict[int, float]]:
    """The stop biases that were found before, of rows that have one for every budget.

    Args:
        folder: of the answers.
        making: what answers are made with.

    Returns:
        Row name to budget to bias.

    Raises:
        ValueError: the file is not one of stop biases.
    """
    entries, budgets = _read(folder / FILE), making.settings.budgets
    found = {name: _entry(entries, name, making)["biases"] for name in making.policies}
    return {
        name: {budget: biases[str(budget)] for budget in budgets}
        for name, biases in found.items()
        if {str(budget) for budget in budgets} <= biases.keys()
    }


def find_biases(
    folder: Path,
    model: VLM,
    policies: Mapping[str, Policy],
    asked: Mapping[str, Sequence[BenchmarkQuestion]],
    making: Making,
    *,
    batch_size: int,
    attention: str,
    sizes: Sequence[int],
) -> dict[str, dict[int, float]]:
    """The stop biases of every policy that stops by itself.

    Those in folder/stop_biases.json that were found for the same policy and model are taken from
    there, so that a run that goes on, or answers another benchmark, uses the same. Those of other
    policies stay there.

    Args:
        folder: of the answers.
        model: the frozen model.
        policies: by row name.
        asked: the questions of each benchmark.
        making: what answers are made with.
        batch_size: questions at a time.
        attention: "matmul", "xla" or "cudnn".
        sizes: widths of prompts and of the user's words.

    Returns:
        Row name to budget to bias.

    Raises:
        ValueError: no question has a picture.
    """
    settings, path = making.settings, folder / FILE
    stopping = {name: p for name, p in policies.items() if stops(name, p, settings)}

    def find() -> dict[str, dict[int, float]]:
        entries = _read(path)
        for name, policy in stopping.items():
            entry = _entry(entries, name, making)
            missing = [b for b in settings.budgets if str(b) not in entry["biases"]]
            if not missing:
                continue
            chosen = _spread(asked, settings.validation_questions)
            margin = _margins(name, model, policy, chosen, batch_size, attention, sizes)
            new = stop_biases(policy, margin, missing)
            # Rounded: the exact number is the margin of some question, whose K would then depend
            # on the last bit of a sum, and so on the size of the batch.
            found = {str(b): round(bias, 3) for b, bias in zip(missing, new, strict=True)}
            entry["biases"] |= found
            entry |= {"questions": len(chosen), "benchmarks": list(asked)}
            if entry not in entries.setdefault(name, []):
                entries[name].append(entry)
            folder.mkdir(parents=True, exist_ok=True)
            write_json(path, entries)
        known = known_biases(folder, making)
        return {name: known[name] for name in stopping}

    return distributed.main_first(find)


def _read(path: Path) -> _Entries:
    """The file; an empty one where there is none."""
    entries = read_json_object(path) if path.is_file() else {}
    for name, found in entries.items():
        good = isinstance(found, list) and all(isinstance(e, dict) and "biases" in e for e in found)
        if not good:
            raise ValueError(f"{path}: {name!r} is not a list of stop biases; move the file away")
    return entries


def _entry(entries: _Entries, name: str, making: Making) -> dict[str, Any]:
    """What was found for a row's policy and this model, or a new entry."""
    about = {"policy": making.policies[name], "weights": making.weights}
    found = [e for e in entries.get(name, []) if about.items() <= e.items()]
    return found[0] if found else {**about, "biases": {}}


def _spread(asked: Mapping[str, Sequence[BenchmarkQuestion]], most: int) -> list[BenchmarkQuestion]:
    """Questions with a picture, as many of each benchmark, spread evenly over it."""
    chosen = []
    for questions in asked.values():
        shown = [question for question in questions if question.image is not None]
        count = min(len(shown), max(1, most // len(asked))) if most else len(shown)
        chosen += [shown[number * len(shown) // count] for number in range(count)]
    if not chosen:
        raise ValueError(f"no question of {', '.join(asked)} has a picture to find stop biases on")
    return chosen


def _margins(
    name: str,
    model: VLM,
    policy: Policy,
    questions: Sequence[BenchmarkQuestion],
    size: int,
    attention: str,
    sizes: Sequence[int],
) -> np.ndarray:
    """Stop margins [q, T] of a rollout on each question."""
    steps = policy.config.steps(model.config.num_image_tokens)
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
