"""Exports the policy of a run as one file with a model card, without the frozen model.

    stepprune-export runs/shapes --out release/

This command writes release/policy.safetensors, which `stepprune-generate` and `eval.py` take as
--policy, and release/README.md, the model card. The run may be unfinished or running.
`--push owner/name` uploads both files to the Hugging Face hub, for `--policy hub:owner/name`.
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
from stepprune_jax.user_input import UserError, expect, local_path
from stepprune_jax.workdir.checkpoints import read_latest
from stepprune_jax.workdir.metrics import read_rows

_NAME = "stepprune-export"
CARD = "README.md"
_TEMPLATE = Path(__file__).parents[1] / "assets" / "model_card.md"
# Files of a run whose last row is in the card, with the row's title.
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
        out: folder to write to; created if needed.
        stop_bias: default stop bias of the exported policy.
        target: the hub repository that the card names for downloads; None names the file.

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
    }
    card = model_card(policy, provenance, last_metrics(workdir, step), target)
    path = save_policy(policy, out / POLICY_FILE, provenance)
    (out / CARD).write_text(card, encoding="utf-8", errors="backslashreplace")
    return path


def _calibration(path: Path, policy: Policy) -> Calibration | None:
    """Returns the calibration of a finished run, or None if its policy differs from `policy`."""
    try:
        finished = load_policy(path)
    except (OSError, UserError):
        return None
    return finished.calibration if same_policy(finished, policy) else None


def same_policy(first: Policy, second: Policy) -> bool:
    """Returns whether two policies are bitwise equal, ignoring their measurements."""
    first, second = first.replace(calibration=None), second.replace(calibration=None)
    leaves = map(jax.tree.leaves, (first, second))
    return jax.tree.structure(first) == jax.tree.structure(second) and all(
        np.array_equal(*pair) for pair in zip(*leaves, strict=True)
    )


def latest_policy(workdir: Path) -> tuple[int, Policy, Json]:
    """Reads a run's latest checkpoint.

    Returns:
        The number of updates, the policy, and the run's metadata.
    """
    step, arrays, metadata = read_latest(workdir.resolve())
    if "selector" not in metadata:
        raise UserError(
            f"{workdir} has no checkpoints of a policy, expected the folder of a run of train.py"
        )
    config = read_config(workdir, metadata["selector"])
    # The policy reads the first features. The statistics of deep features follow and are dropped.
    stats, _ = FeatureStats(**arrays["stats"]).split(config.feature_width)
    return (
        step,
        selector_of(config).replace(params=arrays["state"]["params"], stats=stats),
        metadata,
    )


def last_metrics(workdir: Path, step: int) -> Json:
    """Reads the last rows of a run's metrics up to a step, by "training" and "validation"."""
    rows_by_kind = {}
    for name, kind in _METRIC_FILES.items():
        rows = [row for row in read_rows(workdir / name) if row["step"] <= step]
        if rows:
            rows_by_kind[kind] = rows[-1]
    return rows_by_kind


def model_card(
    policy: Policy,
    provenance: Json,
    last_rows: Json,
    target: hub.Repository | None = None,
) -> str:
    """Fills the template of the model card: Markdown with the YAML header of model hubs.

    Args:
        policy: the policy.
        provenance: "step", "config" (fields by dotted name), and the hashes "model" and "data".
        last_rows: result of `last_metrics`.
        target: the hub repository that the card names for downloads; None names the file.
    """
    config, step = provenance["config"], provenance["step"]
    name = config["model.folder"]
    base = hub.repository(name)
    data = config["data.train_file"] or config["data.folder"]
    lines = [
        f"- {kind}, after update {row['step']}: "
        + ", ".join(f"{key} {value:.4g}" for key, value in row.items() if _is_metric(key, value))
        for kind, row in last_rows.items()
    ]
    return string.Template(_TEMPLATE.read_text(encoding="utf-8")).substitute(
        base_model="" if base is None else f"base_model: {base.name}\n",
        policy=POLICY_FILE if target is None else f"{hub.PREFIX}{target}",
        title=f"A token selector for {name}",
        method=policy.name,
        model=name,
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
        figures="\n".join(lines) or "None were logged.",
        config=json.dumps(config, indent=1),
    )


def _is_metric(key: str, value: object) -> bool:
    """Returns whether a field of a row is a metric that the card lists."""
    return key != "step" and isinstance(value, int | float)


def main(argv: Sequence[str] | None = None) -> None:
    """Runs the command."""
    parser = Parser(prog=_NAME, description=__doc__.splitlines()[0])
    parser.add_argument("workdir", help="folder of a run of train.py")
    parser.add_argument("--out", required=True, help="folder to write to")
    parser.add_argument(
        "--stop_bias",
        type=float,
        default=0.0,
        help="default stop bias of the exported policy; a higher bias keeps fewer tokens",
    )
    parser.add_argument(
        "--push",
        metavar="OWNER/NAME",
        help="upload both files to the Hugging Face hub",
    )
    text = "with --push: create a private repository"
    parser.add_argument("--private", action="store_true", help=text)
    flags = parser.parse_args(argv)
    if flags.private and flags.push is None:
        raise UserError("--private is given without --push, expected both or neither")
    target = None if flags.push is None else _push_target(flags.push)
    stop_bias = flags.stop_bias
    expect("--stop_bias", stop_bias, is_number(stop_bias), "a finite number")
    check_creatable("--out", flags.out, is_folder=True)
    path = export(flags.workdir, flags.out, flags.stop_bias, target)
    print(f"{path}\n{path.parent / CARD}", flush=True)
    if target is not None:
        names = (POLICY_FILE, CARD)
        print(hub.upload(path.parent, names, target, private=flags.private))


def _push_target(name: str) -> hub.Repository:
    """Returns the repository of --push.

    Raises:
        UserError: the name is not owner/name.
    """
    target = hub.repository(hub.PREFIX + name.removeprefix(hub.PREFIX))
    if target is None:
        raise UserError(f"--push is {name!r}, expected owner/name")
    return target


def command() -> NoReturn:
    """Runs the command and exits."""
    exit_with(_NAME, main)


if __name__ == "__main__":
    command()
