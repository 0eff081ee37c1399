"""A run's folder: what it is a run of, and states to go on from."""

import hashlib
import json
import os
from pathlib import Path
from typing import Any, NamedTuple

import jax
import orbax.checkpoint as ocp

from stepprune_jax.checkpoints.folder import Source
from stepprune_jax.policy import FeatureStats
from stepprune_jax.training.settings import changed_fields, flat
from stepprune_jax.training.step import State

RUN_FILE = "run.json"
POLICY_FILE = "policy.safetensors"


class Saved(NamedTuple):
    """What a checkpoint holds; the frozen weights are not among it.

    Attributes:
        state: weights, moments and counters.
        stats: statistics of the tower's features.
    """

    state: State
    stats: FeatureStats


def model_identity(source: Source) -> str:
    """A hash of a model's configuration and of the names and sizes of its weight files."""
    found = hashlib.sha256()
    for folder in filter(None, (source.folder, source.vision_folder)):
        found.update((folder / "config.json").read_bytes())
        for path in sorted(folder.glob("*.safetensors")):
            found.update(f"{path.name} {path.stat().st_size}\n".encode())
    return found.hexdigest()


def file_identity(path: Path) -> str:
    """A hash of a file's contents."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def claim(workdir: Path, config: Any, model: str, data: str) -> None:
    """Makes a folder that of this run, or makes sure that it is.

    Args:
        workdir: the folder; created if needed.
        config: the run's `ConfigDict`.
        model: `model_identity` of the frozen model.
        data: `file_identity` of the training file.

    Raises:
        ValueError: the folder is that of a run with another configuration, model or training file;
            all fields that differ are named. Or it has checkpoints and no run.json.
    """
    path = workdir / RUN_FILE
    run = {"config": flat(config), "model": model, "data": data}
    if not path.is_file():
        if (workdir / "checkpoints").exists():
            raise ValueError(
                f"{workdir} has checkpoints but no {RUN_FILE}, so they cannot be told to be of "
                "this run: give another --workdir, or remove the folder"
            )
        workdir.mkdir(parents=True, exist_ok=True)
        _write(path, run)
        return
    try:
        old = json.loads(path.read_text())
        changes = changed_fields(old["config"], run["config"], config.method)
        for part in ("model", "data"):
            if old[part] != run[part]:
                changes.append(f"the {'frozen model' if part == 'model' else 'training file'}")
    except (json.JSONDecodeError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{path} is not the description of a run: {error!r}") from error
    if changes:
        raise ValueError(
            f"{workdir} is the folder of another run; give another --workdir, or go on with what "
            "it began with. These differ:\n  " + "\n  ".join(changes)
        )


def _write(path: Path, value: dict[str, Any]):
    partial = path.with_suffix(".partial")
    partial.write_text(json.dumps(value, indent=1) + "\n")
    os.replace(partial, path)


class Checkpoints:
    """The states of a run, by the number of updates done."""

    def __init__(self, workdir: Path, keep: int):
        """Opens workdir/checkpoints, of which the last `keep` states stay."""
        # Written before the next update: that donates the state's buffers.
        options = ocp.CheckpointManagerOptions(max_to_keep=keep, enable_async_checkpointing=False)
        self._manager = ocp.CheckpointManager(workdir / "checkpoints", options=options)

    @property
    def latest(self) -> int | None:
        """Updates done in the latest complete checkpoint, or None."""
        return self._manager.latest_step()

    def save(self, step: int, saved: Any):
        """Saves the state after `step` updates, unless it is there."""
        if step != self.latest:
            self._manager.save(step, args=ocp.args.StandardSave(saved))

    def restore(self, like: Any) -> Any:
        """The latest state.

        Args:
            like: arrays of the shapes, dtypes and shardings to restore to.

        Returns:
            The state.

        Raises:
            ValueError: it does not have these shapes, or is damaged.
        """
        abstract = jax.tree.map(ocp.utils.to_shape_dtype_struct, like)
        try:
            return self._manager.restore(self.latest, args=ocp.args.StandardRestore(abstract))
        except (ValueError, KeyError, OSError) as error:
            raise ValueError(
                f"checkpoint {self.latest} of {self._manager.directory} cannot be read: {error}. "
                "Remove its folder to go on from an earlier one"
            ) from error

    def close(self):
        """Waits for what is being written."""
        self._manager.close()
