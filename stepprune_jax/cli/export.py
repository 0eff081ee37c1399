"""Exports the policy of a run as one file with a model card, without the frozen model.

    stepprune-export runs/shapes --out release/

writes release/policy.safetensors, which `stepprune-generate` and `eval.py` take as --policy,
and release/README.md, which states what it was trained on. The run may be unfinished or running.
`--push owner/name` uploads both to the Hugging Face hub, for `--policy hub:owner/name`.
"""

import json
import string
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

import jax
import numpy as np

from stepprune_jax.checkpoints import hub
from stepprune_jax.checkpoints.policy import POLICY_FILE, load_policy, read_config, save_policy
from stepprune_jax.cli.command_line import Parser, check_creatable, exit_with
from stepprune_jax.models.config import Json
from stepprune_jax.policy import FeatureStats
from stepprune_jax.policy.params import count_weights
from stepprune_jax.registry import selector_of
from stepprune_jax.selectors import Policy
from stepprune_jax.selectors.calibration import Calibration
from stepprune_jax.settings import is_number
from stepprune_jax.user_input import UserError, expect, local_path, require
from stepprune_jax.workdir.checkpoints import read_latest
from stepprune_jax.workdir.metrics import read_rows

_NAME = "stepprune-export"
CARD = "README.md"
_TEMPLATE = Path(__file__).parents[1] / "assets" / "model_card.md"
# Files of a run whose last line is shown, with its title.
_FIGURES = {"metrics.jsonl": "training", "validation.jsonl": "validation"}


def export(
    workdir: str | Path,
    out: str | Path,
    stop_bias: float = 0.0,
    target: hub.Repository | None = None,
) -> Path:
    """Writes the policy of a run's latest checkpoint, and its model card.

    Args:
        workdir: folder of the run.
        out: folder to write to; created if needed.
        stop_bias: default stop bias of the exported policy.
        target: the hub repository it will be uploaded to, for the card; None for a file.

    Returns:
        The policy's file.

    Raises:
        FileNotFoundError: the run has no checkpoint.
        FileExistsError: `out` already has a policy or a README.md.
        ValueError: the checkpoint is damaged, or is not a policy's.
    """
    workdir, out = local_path(workdir), local_path(out)
    for name in (POLICY_FILE, CARD):
        if (out / name).exists():
            raise FileExistsError(f"{out / name} exists: remove it, or give another --out")
    step, policy, about = latest_policy(workdir)
    measured = _calibration(workdir / POLICY_FILE, policy)
    policy = policy.replace(stop_bias=float(stop_bias), calibration=measured)
    trained = {"step": step, **{name: about[name] for name in ("config", "model", "data")}}
    card = model_card(policy, trained, figures(workdir, step), target)
    path = save_policy(policy, out / POLICY_FILE, trained)
    (out / CARD).write_text(card, encoding="utf-8", errors="backslashreplace")
    return path


def _calibration(path: Path, policy: Policy) -> Calibration | None:
    """Returns the calibration of a policy, if the run has finished and measured it."""
    try:
        finished = load_policy(path)
    except (OSError, UserError):
        return None
    return finished.calibration if same_policy(finished, policy) else None


def same_policy(one: Policy, other: Policy) -> bool:
    """Returns whether two policies are bitwise equal, ignoring their measurements."""
    one, other = one.replace(calibration=None), other.replace(calibration=None)
    leaves = map(jax.tree.leaves, (one, other))
    return jax.tree.structure(one) == jax.tree.structure(other) and all(
        np.array_equal(*pair) for pair in zip(*leaves, strict=True)
    )


def latest_policy(workdir: Path) -> tuple[int, Policy, Json]:
    """Reads a run's latest checkpoint: updates done, the policy, and the run's metadata."""
    step, arrays, about = read_latest(workdir.resolve())
    missing = f"{workdir} holds no checkpoints of a policy: they do not name a method"
    require("selector" in about, missing)
    config = read_config(workdir, about["selector"])
    # A model's deep features have theirs behind those that the policy reads.
    stats, _ = FeatureStats(**arrays["stats"]).split(config.feature_width)
    return step, selector_of(config).replace(params=arrays["state"]["params"], stats=stats), about


def figures(workdir: Path, step: int) -> Json:
    """Reads a run's last logged metrics up to a step, "training" and "validation"."""
    found = {}
    for name, kind in _FIGURES.items():
        rows = [row for row in read_rows(workdir / name) if row["step"] <= step]
        if rows:
            found[kind] = rows[-1]
    return found


def model_card(
    policy: Policy,
    trained: Json,
    last: Json,
    target: hub.Repository | None = None,
) -> str:
    """Fills the model card, Markdown with a YAML header as model hubs read it.

    `trained` has "step", "config" (fields by dotted name) and the hashes "model" and "data"; `last`
    is the result of `figures`.
    """
    config, step = trained["config"], trained["step"]
    name = config["model.folder"]
    base = hub.repository(name)
    data = config["data.train_file"] or config["data.folder"]
    lines = [
        f"- {kind}, after update {row['step']}: "
        + ", ".join(f"{key} {value:.4g}" for key, value in row.items() if _is_figure(key, value))
        for kind, row in last.items()
    ]
    return string.Template(_TEMPLATE.read_text(encoding="utf-8")).substitute(
        base_model="" if base is None else f"base_model: {base.name}\n",
        policy=POLICY_FILE if target is None else f"{hub.PREFIX}{target}",
        title=f"A token selector for {name}",
        method=policy.name,
        model=name,
        model_hash=trained["model"],
        data=data,
        data_hash=trained["data"],
        step=step,
        steps=config["steps"],
        batch_size=config["batch_size"],
        feature_width=policy.config.feature_width,
        text_width=policy.config.text_width,
        count=f"{count_weights(policy.params):,}",
        stop_bias=f"{policy.stop_bias:g}",
        figures="\n".join(lines) or "None were logged.",
        config=json.dumps(config, indent=1),
    )


def _is_figure(key: str, value: object) -> bool:
    return key != "step" and isinstance(value, int | float)


def main(argv: Sequence[str] | None = None) -> None:
    """Reads the arguments and exports."""
    parser = Parser(prog=_NAME, description=__doc__.splitlines()[0])
    parser.add_argument("workdir", help="folder of a run of train.py")
    parser.add_argument("--out", required=True, help="folder to write to")
    parser.add_argument(
        "--stop_bias", type=float, default=0.0, help="the policy's default; higher keeps fewer"
    )
    parser.add_argument(
        "--push",
        metavar="OWNER/NAME",
        help="upload both files to the Hugging Face hub",
    )
    parser.add_argument("--private", action="store_true", help="with --push: create it as private")
    arguments = parser.parse_args(argv)
    private = "--private belongs to --push"
    require(arguments.push is not None or not arguments.private, private)
    target = None if arguments.push is None else _target(arguments.push)
    bias = arguments.stop_bias
    expect("--stop_bias", bias, is_number(bias), "a finite number")
    check_creatable("--out", arguments.out, is_folder=True)
    path = export(arguments.workdir, arguments.out, arguments.stop_bias, target)
    print(f"{path}\n{path.parent / CARD}", flush=True)
    if target is not None:
        names = (POLICY_FILE, CARD)
        print(hub.upload(path.parent, names, target, private=arguments.private))


def _target(given: str) -> hub.Repository:
    """Returns the repository of --push, checked before anything is written."""
    target = hub.repository(hub.PREFIX + given.removeprefix(hub.PREFIX))
    if target is None:
        raise UserError(f"--push is {given!r}, expected owner/name")
    return target


def command() -> NoReturn:
    """Runs the command and exits."""
    exit_with(_NAME, main)


if __name__ == "__main__":
    command()
