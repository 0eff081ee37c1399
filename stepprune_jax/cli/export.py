"""Exports the policy of a run as one file with a model card, without the frozen model.

    stepprune-export runs/shapes --out release/

This command writes release/policy.safetensors, which `stepprune-generate` and `eval.py` take as
--policy, and release/README.md, the model card. The run may be unfinished or running.
`--push owner/name` uploads both files to the Hugging Face hub, for `--policy hub:owner/name`.
"""

import dataclasses
import json
import string
from collections.abc import Sequence
from pathlib import Path

import jax
import numpy as np

from stepprune_jax.checkpoints import hub
from stepprune_jax.checkpoints.policy import POLICY_FILE, load_policy, read_config, save_policy
from stepprune_jax.cli.command_line import check_creatable, exit_with
from stepprune_jax.cli.flags.export import NAME, parse
from stepprune_jax.models.config import Json
from stepprune_jax.policy import FeatureStats
from stepprune_jax.policy.params import count_weights
from stepprune_jax.registry import selector_of
from stepprune_jax.selectors import Policy, TrainedPruner
from stepprune_jax.selectors.calibration import Calibration
from stepprune_jax.settings import Settings, is_number
from stepprune_jax.training.objectives import RlooObjective
from stepprune_jax.training.recipes import Auto
from stepprune_jax.training.settings import Run, read_former_recipe
from stepprune_jax.user_input import UserError, expect, local_path
from stepprune_jax.workdir.checkpoints import read_latest
from stepprune_jax.workdir.metrics import read_rows

CARD = "README.md"
_TEMPLATE = Path(__file__).parents[1] / "assets" / "model_card.md"
# Log files whose last row the card shows, and the row's title in the card.
_METRIC_FILES = {"metrics.jsonl": "training", "validation.jsonl": "validation"}


def export(
    workdir: str | Path,
    out: str | Path,
    stop_bias: float = 0.0,
    target: hub.Repository | None = None,
) -> Path:
    """Writes the policy of a run's latest checkpoint, and its model card.

    Args:
        workdir: folder of the run.
        out: folder for both files; created if needed.
        stop_bias: number that the exported policy adds to its stop logits by default. A higher bias
            keeps fewer tokens.
        target: the hub repository that the card's commands pass as --policy. None names the file.

    Returns:
        The path of the policy file.

    Raises:
        FileNotFoundError: the run has no checkpoint.
        FileExistsError: `out` already has a policy or a README.md.
        UserError: the checkpoint is damaged, or has no policy.
    """
    workdir, out = local_path(workdir), local_path(out)
    for name in (POLICY_FILE, CARD):
        if (out / name).exists():
            raise FileExistsError(f"{out / name} exists: remove it, or give another --out")
    step, policy, run_metadata = latest_policy(workdir)
    calibration = _calibration(workdir / POLICY_FILE, policy)
    policy = policy.replace(stop_bias=float(stop_bias), calibration=calibration)
    provenance = {
        "step": step,
        **{name: run_metadata[name] for name in ("config", "model", "data")},
        # The recipe "auto" stores its choice.
        **({"begin": run_metadata["begin"]} if "begin" in run_metadata else {}),
    }
    card = model_card(policy, provenance, last_metrics(workdir, step), target)
    path = save_policy(policy, out / POLICY_FILE, provenance)
    (out / CARD).write_text(card, encoding="utf-8", errors="backslashreplace")
    return path


def _calibration(path: Path, policy: Policy) -> Calibration | None:
    """Returns the calibration that a finished run has saved with its policy.

    Args:
        path: policy file of the run, which exists once the run has finished.
        policy: policy of the latest checkpoint.

    Returns:
        The calibration. None without a readable file, or if its policy differs from `policy`.
    """
    try:
        finished = load_policy(path)
    except (OSError, UserError):
        return None
    return finished.calibration if same_policy(finished, policy) else None


def same_policy(first: TrainedPruner, second: TrainedPruner) -> bool:
    """Returns whether two policies are bitwise equal, ignoring their calibrations."""
    first, second = first.replace(calibration=None), second.replace(calibration=None)
    if jax.tree.structure(first) != jax.tree.structure(second):
        return False
    return all(map(np.array_equal, jax.tree.leaves(first), jax.tree.leaves(second)))


def latest_policy(workdir: Path) -> tuple[int, Policy, Json]:
    """Reads the policy of a run's latest checkpoint.

    Args:
        workdir: folder of a run of train.py.

    Returns:
        The number of updates, the policy, and the checkpoint's metadata.

    Raises:
        FileNotFoundError: the run has no checkpoint.
        UserError: all checkpoints are damaged, or have no policy.
    """
    step, arrays, metadata = read_latest(workdir.resolve())
    if "selector" not in metadata:
        raise UserError(
            f"{workdir} has no checkpoints of a policy, expected the folder of a run of train.py"
        )
    config = read_config(workdir, metadata["selector"])
    # The run may also have the statistics of deep features, which the policy does not read. They
    # follow the features of the policy.
    stats, _ = FeatureStats(**arrays["stats"]).split(config.feature_width)
    policy = selector_of(config).replace(params=arrays["state"]["params"], stats=stats)
    return step, policy, metadata


def last_metrics(workdir: Path, step: int) -> Json:
    """Reads the last row of each of a run's log files, up to a step.

    Args:
        workdir: folder of the run.
        step: number of updates of the exported checkpoint. Later rows are ignored.

    Returns:
        A dictionary with "training" and "validation". A log without rows has no key.
    """
    last_rows = {}
    for file_name, title in _METRIC_FILES.items():
        rows = [row for row in read_rows(workdir / file_name) if row["step"] <= step]
        if rows:
            last_rows[title] = rows[-1]
    return last_rows


def model_card(
    policy: Policy,
    provenance: Json,
    last_rows: Json,
    target: hub.Repository | None = None,
) -> str:
    """Fills the template of the model card: Markdown with the YAML header of model hubs.

    Args:
        policy: the exported policy.
        provenance: metadata of the policy file: "step" (number of updates), "config" (fields by
            dotted name), the hashes "model" and "data", and for the recipe "auto" "begin", the
            first objective that it chose.
        last_rows: result of `last_metrics`.
        target: the hub repository that the card's commands pass as --policy. None names the file.

    Returns:
        The text of the card.
    """
    config, step = provenance["config"], provenance["step"]
    model_name = config["model.folder"]
    base_repository = hub.repository(model_name)  # None if the model is a local folder.
    data = config["data.train_file"] or config["data.folder"]
    metric_lines = []
    for title, row in last_rows.items():
        # NaN is logged as null.
        metrics = {name: value for name, value in row.items() if isinstance(value, int | float)}
        update = metrics.pop("step")
        values = ", ".join(f"{name} {value:.4g}" for name, value in metrics.items())
        metric_lines.append(f"- {title}, after update {update}: {values}")
    return string.Template(_TEMPLATE.read_text(encoding="utf-8")).substitute(
        base_model="" if base_repository is None else f"base_model: {base_repository.name}\n",
        policy=POLICY_FILE if target is None else f"{hub.PREFIX}{target}",
        title=f"A token selector for {model_name}",
        method=policy.name,
        model=model_name,
        model_hash=provenance["model"],
        data=data,
        data_hash=provenance["data"],
        step=step,
        steps=config["steps"],
        batch_size=config["batch_size"],
        feature_width=policy.config.feature_width,
        text_width=policy.config.text_width,
        count=f"{count_weights(policy.params):,}",
        stop_bias=f"{policy.stop_bias:g}",
        recipe=_describe_recipe(config, provenance.get("begin")),
        figures="\n".join(metric_lines) or "None were logged.",
        config=json.dumps(config, indent=1),
    )


def _describe_recipe(config: Json, begin: str | None) -> str:
    """Lists the phases of a run with the values that their updates used.

    Args:
        config: settings of the run by dotted name.
        begin: first objective that the recipe "auto" chose; None for other recipes.

    Returns:
        Markdown: a sentence about the recipe, and one item per phase.
    """
    groups = ("optimizer", "rloo", "warm_start", config.get("method", "stepprune"))
    names = ("method", "recipe", "steps", "text_gate_anneal")
    values = {
        name: tuple(value) if isinstance(value, list) else value
        for name, value in config.items()
        if name in names or name.partition(".")[0] in (*groups, "policy")
    }
    try:
        # `Run.replace` would refuse values that the recipe does not read.
        run = Settings.replace(Run(), values)
        assert isinstance(run, Run)
        recipe = run.make_recipe()
        if isinstance(recipe, Auto):
            recipe = recipe.choose(str(read_former_recipe(begin)))
        phases = recipe.phases(run.steps)
    except (UserError, KeyError, TypeError):  # settings of an earlier version
        return f"Recipe `{config.get('recipe')}`; the settings are below."
    chosen = f", which chose `{begin}` by its trial" if begin else ""
    lines = [f"Recipe `{run.recipe}`{chosen}:\n"]
    for phase in phases:
        optimizer = phase.optimizer
        rates = f"AdamW {optimizer.lr:g} to {optimizer.final_lr:g}"
        rates += f", Muon {optimizer.muon_lr:g}" if optimizer.muon_lr else ""
        lines.append(
            f"- updates {phase.first + 1} to {phase.last}: {phase.objective.title}; {rates}, "
            f"updates of the warm-up: {optimizer.warmup}"
        )
        if isinstance(phase.objective, RlooObjective):
            objective = phase.objective
            fields = dataclasses.asdict(objective.settings)
            fields |= {
                "temperature": objective.temperature,
                "length_weight": objective.length_weight,
            }
            pairs = (f"{name} {value}" for name, value in fields.items() if "lr" not in name)
            lines[-1] += f"; {', '.join(pairs)}"
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> None:
    """Exports the policy of a run with its model card, and uploads both if requested.

    Args:
        argv: command-line arguments; None reads the arguments of the process.
    """
    flags = parse(argv)
    if flags.private and flags.push is None:
        raise UserError("--private is given without --push, expected both or neither")
    target = None
    if flags.push is not None:  # "owner/name", with or without the prefix "hub:".
        target = hub.repository(hub.PREFIX + flags.push.removeprefix(hub.PREFIX))
        expect("--push", flags.push, target is not None, "owner/name")
    expect("--stop_bias", flags.stop_bias, is_number(flags.stop_bias), "a finite number")
    check_creatable("--out", flags.out, is_folder=True)
    path = export(flags.workdir, flags.out, flags.stop_bias, target)
    print(f"{path}\n{path.parent / CARD}", flush=True)
    if target is not None:
        names = (POLICY_FILE, CARD)
        print(hub.upload(path.parent, names, target, private=flags.private))


def command() -> None:
    """Runs the command and exits with its status."""
    exit_with(NAME, main)


if __name__ == "__main__":
    command()
