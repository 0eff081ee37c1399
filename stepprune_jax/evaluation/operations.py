"""Operations (FLOPs) of table rows up to the first token of an answer, by formula."""

import contextlib
import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Int

from stepprune_jax.benchmarks import BenchmarkQuestion
from stepprune_jax.benchmarks.answer_files import AnswerFile, Provenance
from stepprune_jax.benchmarks.answers import read_answers
from stepprune_jax.checkpoints.folder import Source, load_tokenizer
from stepprune_jax.checkpoints.policy import load_policy
from stepprune_jax.data.images import open_image
from stepprune_jax.data.prompts import question_ids, tokenize_with_images
from stepprune_jax.evaluation.encode import open_bytes
from stepprune_jax.evaluation.names import ALL, DEFAULT, without_own_stop
from stepprune_jax.evaluation.rows import policy_digest
from stepprune_jax.evaluation.settings import EvalSettings, find_policy
from stepprune_jax.flops import llm_flops, policy_flops, vision_flops
from stepprune_jax.models.config import ModelConfig
from stepprune_jax.pruning import PRUNERS, Budget, Policy, Pruner, TrainedMethod, make_method


class Lengths(NamedTuple):
    """Text tokens of prompts with one image, and how many of them are the user's words."""

    text: Int[np.ndarray, "q"]
    words: Int[np.ndarray, "q"]


def count_operations(
    source: Source,
    settings: EvalSettings,
    questions: Sequence[BenchmarkQuestion],
    grids: Mapping[Path | bytes, tuple[int, int]],
    files: Sequence[AnswerFile],
    own: Path | None,
) -> list[float | None]:
    """Counts the GFLOPs of complete answer files, averaged over the questions with an image.

    None if a policy's file was removed or replaced, or no question has an image.
    """
    shown = [question for question in questions if question.image is not None]
    if not shown:
        return [None] * len(files)
    of_each = np.array([grids[question.image] for question in shown])
    tokenizer = load_tokenizer(source.folder)
    lengths = prompt_lengths(tokenizer, source.config, [question.text for question in shown])
    found = []
    for file, policy in zip(files, row_policies(settings, files, own), strict=True):
        pruner = pruner_of(file.provenance, policy)
        if pruner is None:
            found.append(None)
            continue
        kept = {(a.id, a.fields["prompt"]): a.fields["kept"] for a in read_answers(file.path)}
        count = np.array([kept[question.key] for question in shown])
        flops = mean_flops(source.config, pruner, lengths, count, of_each)
        found.append(float(f"{flops / 1e9:.4g}"))
    return found


def image_grids(
    source: Source, images: Sequence[Path | bytes]
) -> dict[Path | bytes, tuple[int, int]]:
    """Measures images, some perhaps more than once, in rows and columns of visual tokens."""
    config, family = source.config, source.config.family
    settings = family.image_settings(source.vision_folder or source.folder)
    grids: dict[Path | bytes, tuple[int, int]] = {}
    for image in dict.fromkeys(images):
        if grids and not config.sizes_vary:  # one stands for all
            grids[image] = next(iter(grids.values()))
            continue
        opened = open_bytes(image) if isinstance(image, bytes) else open_image(image)
        rows, columns = family.grids(config, family.preprocess(config, settings, [opened]))[0]
        grids[image] = int(rows), int(columns)
    return grids


def prompt_lengths(tokenizer: Any, config: ModelConfig, questions: Sequence[str]) -> Lengths:
    """Measures questions about one image each, in the template of the model's family."""
    text, words = [], []
    for question in questions:
        turns = [config.family.place_images(question, 1)]
        prompt = config.family.conversation(turns)
        text.append(len(tokenize_with_images(tokenizer, prompt, 1)) - 1)
        words.append(len(question_ids(tokenizer, turns)))
    return Lengths(np.array(text), np.array(words))


def first_token_flops(
    config: ModelConfig, pruner: Pruner, grid: tuple[int, int], text: int, words: int, kept: int
) -> dict[str, float | int]:
    """Counts the operations of one prompt with one image, up to the first token, by part.

    `words` of the `text` tokens are the user's. `kept` counts where the method decides; other
    budgets follow from the pruner. `choice` is 0 for methods without training.
    """
    n = int(config.family.num_tokens(config, np.array([grid]))[0])
    stops = not pruner.budget.is_exact
    visual = pruner.layer_tokens(config, n, kept if stops else None)
    projected = n if pruner.after_projector else visual[0]
    vision = vision_flops(config, [grid])
    choice = 0
    if isinstance(pruner, TrainedMethod) and pruner.shape is not None:
        steps = pruner.pointer_steps(kept)
        work = policy_flops(pruner.shape, n, words, steps or 0, exact=not stops)
        choice = work["encoder"] if steps is None else work["total"]
    return {
        "tower": vision["tower"],
        "choice": choice,
        "projector": vision["projector"] * projected / n,
        "prefill": llm_flops(config.text, [text + count for count in visual]).flops,
    }


def mean_flops(
    config: ModelConfig,
    pruner: Pruner,
    lengths: Lengths,
    kept: Int[np.ndarray, "q"],
    grids: Int[np.ndarray, "q 2"],
) -> float:
    """Averages `first_token_flops` over questions, given the tokens kept and grids of images."""
    rows = np.stack([*lengths, kept, *grids.T], axis=1)
    distinct, times = np.unique(rows, axis=0, return_counts=True)
    each = [
        sum(first_token_flops(config, pruner, (rows, columns), *row).values())
        for *row, rows, columns in distinct.tolist()
    ]
    return float(np.average(each, weights=times))


def pruner_of(provenance: Provenance, policy: Policy | None) -> Pruner | None:
    """Rebuilds the pruner of an answer file; None without its policy, or for an unknown method."""
    made, untrained = provenance.made, {kind.label: name for name, kind in PRUNERS.items()}
    if policy is None and ("policy" in made or provenance.method not in untrained):
        return None
    name = policy.method if policy is not None else untrained[provenance.method]
    if provenance.method == ALL:
        budget = Budget()
    elif provenance.budget is None:
        budget = Budget("own")
    elif provenance.mode == "adaptive":
        budget = Budget("mean", provenance.budget)
    else:
        share = made.get("share")
        budget = Budget.parse(provenance.budget if share is None else str(share))
    fields = {field.name for field in dataclasses.fields(PRUNERS[name])} - {"budget", "config"}
    options = {field: made[field] for field in fields & made.keys()}
    bias = provenance.stop_bias
    return make_method(name, budget, policy=policy, stop_bias=bias, options=options).pruner


def row_policies(
    settings: EvalSettings, files: Sequence[AnswerFile], own: Path | None
) -> list[Policy | None]:
    """Loads the policy of each answer file; None without training, or if its file changed."""
    known: dict[str, Policy | None] = {}

    def find(label: str) -> Policy | None:
        path = own if label == DEFAULT else settings.rows.get(label)
        if path is not None:
            with contextlib.suppress(OSError, ValueError):
                return load_policy(find_policy(path))
        return None

    policies: list[Policy | None] = []
    for file in files:
        made, label = file.provenance.made, without_own_stop(file.provenance.method)
        if "policy" in made and label not in known:
            known[label] = find(label)
        policy = known.get(label)
        same = policy is not None and policy_digest(policy) == made["policy"]
        policies.append(policy if same else None)
    return policies
