"""Checkpoints of a run, the description of its folder, and interruptions that save."""

import contextlib
import json
import logging
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import jax
import orbax.checkpoint as ocp
from jaxtyping import PyTree

from stepprune_jax.checkpoints.identity import file_identity
from stepprune_jax.data.json_files import JsonObject, read_json_object, write_json
from stepprune_jax.parallel import distributed
from stepprune_jax.parallel.sharding import path_name
from stepprune_jax.settings import Settings
from stepprune_jax.user_input import UserError, naming

_LOG = logging.getLogger(__name__)

RUN_FILE = "run.json"
FOLDER = "checkpoints"
# Folder for checkpoints that cannot be read.
DAMAGED = "damaged"
# The hashes of a checkpoint's files: Orbax would return wrong numbers where a bit has changed.
_HASHES = "hashes.json"
# Seconds that a process waits for a file of another.
_PATIENCE = 60
# Beginnings of names of files that an operating system adds: macOS on foreign disks, and NFS.
_SYSTEM_FILES = ("._", ".DS_Store", ".nfs")
# In TensorStore's messages for a full disk, missing permissions, and others of the system.
_REFUSED = ("RESOURCE_EXHAUSTED", "PERMISSION_DENIED", "os_error_code")


class Restored(NamedTuple):
    """A restored checkpoint: updates done, the arrays, and the JSON object saved with them."""

    step: int
    saved: PyTree
    about: JsonObject


def read_latest(workdir: Path) -> Restored:
    """Reads the latest undamaged checkpoint to the first device, in dictionaries by field.

    It changes nothing, so it may be called while the run trains.
    """
    folder = workdir / FOLDER
    if not folder.is_dir():
        raise FileNotFoundError(f"{workdir} has no {FOLDER}/: expected the --workdir of train.py")
    options = ocp.CheckpointManagerOptions(read_only=True)
    with contextlib.closing(_open(folder, options)) as manager:
        step, problems = _newest(manager)
        for number, problem in problems.items():
            text = f"checkpoint {number} of {folder} is damaged ({problem})"
            _LOG.warning("%s; using checkpoint %d", text, step)
        return _read(manager, step)


def _open(folder: Path, options: ocp.CheckpointManagerOptions) -> ocp.CheckpointManager:
    """Opens a folder of checkpoints, each with arrays and a JSON object."""
    parts = {"arrays": ocp.StandardCheckpointHandler(), "beside": ocp.JsonCheckpointHandler()}
    try:
        return ocp.CheckpointManager(folder, options=options, item_handlers=parts)
    except ValueError as error:  # values of wrong types, before any checkpoint can be read
        raise UserError(
            f"{folder}: the file _CHECKPOINT_METADATA of a checkpoint is damaged; remove that "
            f"checkpoint: {error}"
        ) from error


def _newest(manager: ocp.CheckpointManager) -> tuple[int, dict[int, str]]:
    """Returns the latest undamaged checkpoint, and what is wrong with later ones."""
    folder, problems = Path(manager.directory), {}
    for step in sorted(manager.all_steps(), reverse=True):
        problem = _damage(folder / str(step)) if distributed.is_main() else ""
        if not distributed.any_process(bool(problem)):
            return step, problems
        problems[step] = problem
    if not problems:
        raise FileNotFoundError(f"{folder} holds no checkpoint yet")
    listed = "; ".join(f"{step} is damaged: {problem}" for step, problem in problems.items())
    raise UserError(f"no checkpoint in {folder} can be read ({listed}). Remove it to start over")


def _read(manager: ocp.CheckpointManager, step: int, like: PyTree = None) -> Restored:
    """Reads a checkpoint to arrays like the given ones, or to the first device."""
    with naming(f"checkpoint {step} of {manager.directory}", ValueError):  # Orbax raises these
        stored = manager.item_metadata(step)["arrays"]
    if like is None:
        device = jax.sharding.SingleDeviceSharding(jax.devices()[0])
        abstract = jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=device), stored
        )
    elif _shapes(stored) == _shapes(like):
        abstract = jax.tree.map(ocp.utils.to_shape_dtype_struct, like)
    else:
        raise UserError(
            f"checkpoint {step} of {manager.directory} was written by another version: its arrays "
            "have other names or shapes"
        )
    parts = ocp.args.Composite(
        arrays=ocp.args.StandardRestore(abstract), beside=ocp.args.JsonRestore()
    )
    with naming(f"checkpoint {step} of {manager.directory}", ValueError):
        restored = manager.restore(step, args=parts)
    return Restored(step, restored.arrays, restored.beside)


def claim(workdir: Path, config: Settings, model: str, data: str) -> JsonObject:
    """Claims `workdir` for a run, or verifies that the run already owns it.

    A folder is owned as soon as it has a checkpoint: a run that failed before may be corrected.

    Args:
        workdir: the folder; created if needed.
        config: settings of the run.
        model: `model_identity` of the frozen model.
        data: `file_identity` of the training file.

    Returns:
        The description of the run, as in run.json, with whatever else the file says.

    Raises:
        ValueError: the folder belongs to a run with another configuration, model or training file
            (the message lists all differences), or has checkpoints but no run.json.
    """
    path = workdir / RUN_FILE
    run = {"config": config.flat(), "model": model, "data": data}
    begun = any(entry.name.isdigit() for entry in (workdir / FOLDER).glob("*"))
    if not begun and distributed.is_main():  # the others compare with what it writes
        workdir.mkdir(parents=True, exist_ok=True)
        write_json(path, run)
        return run
    if begun and not path.is_file():
        raise UserError(
            f"{workdir} has checkpoints but no {RUN_FILE}, so it is unknown which run they are of: "
            "give another --workdir, or remove the folder"
        )
    if not distributed.is_main():
        _await_shared(path)
    try:
        old = read_json_object(path)
        changes = config.changes(old["config"])
        changes += ["the frozen model"] if old["model"] != model else []
        changes += ["the training file"] if old["data"] != data else []
    except (UserError, KeyError, TypeError, AttributeError) as error:
        raise UserError(f"{path} is not the description of a run: {error!r}") from error
    if changes:
        raise UserError(
            f"{workdir} is the folder of another run; give another --workdir, or resume with the "
            "original settings. These differ:\n  " + "\n  ".join(changes)
        )
    return old | run


def _await_shared(path: Path) -> None:
    """Waits until a file of the main process is visible here: NFS may show it a minute later."""
    for _ in range(_PATIENCE):
        if path.is_file():
            return
        time.sleep(1)
    raise UserError(
        f"no file at {path}, which process 0 of this run has written: expected a --workdir that "
        "all processes share"
    )


class Checkpoints:
    """The states of a run, by the number of updates done, written in the background."""

    def __init__(self, workdir: Path, keep: int):
        """Opens workdir/checkpoints, which keeps the last `keep` states."""
        self._folder, self._damaged = workdir / FOLDER, workdir / DAMAGED
        self._writing = -1
        options = ocp.CheckpointManagerOptions(
            max_to_keep=keep,
            cleanup_tmp_directories=True,
            async_options=ocp.options.AsyncOptions(post_finalization_callback=self._seal),
        )
        self._manager = _open(self._folder, options)

    @property
    def latest(self) -> int | None:
        """Updates done in the latest complete checkpoint, or None."""
        return self._manager.latest_step()

    def save(self, step: int, saved: PyTree, about: JsonObject | None = None):
        """Begins to save the state after `step` updates, unless it is already saved.

        Args:
            step: updates done.
            saved: arrays; they may be donated as soon as this returns.
            about: further parts of the state, as JSON values.

        Raises:
            UserError: this state or the previous one cannot be written, as on a full disk.
        """
        if step == self.latest:
            return
        parts = ocp.args.Composite(
            arrays=ocp.args.StandardSave(saved), beside=ocp.args.JsonSave(about or {})
        )
        with self._written():
            self._manager.wait_until_finished()
            self._writing = step
            self._manager.save(step, args=parts)

    @contextlib.contextmanager
    def _written(self) -> Iterator[None]:
        """Reports write errors, immediate or from the background, in one line."""
        try:
            yield
        except (OSError, ValueError) as error:  # the latter from TensorStore
            if not isinstance(error, OSError) and not any(code in str(error) for code in _REFUSED):
                raise
            reason = " ".join(str(error).partition("[tensorstore_spec=")[0].split())
            what = f"checkpoint {self._writing} cannot be written to {self._folder}"
            raise UserError(f"{what}; earlier ones are kept: {reason}") from error

    def _seal(self):
        """Adds the hashes of all files, after writing and before the final rename."""
        if distributed.is_main():
            (folder,) = self._folder.glob(f"{self._writing}.*")
            (folder / _HASHES).write_text(json.dumps(_contents(folder, self._writing), indent=1))

    def restore(self, like: Callable[[int], PyTree]) -> Restored:
        """Restores the latest readable state; moves later ones to workdir/damaged.

        Args:
            like: maps a number of updates to arrays of the shapes, dtypes and shardings to restore
                to.

        Returns:
            The state and its number of updates.

        Raises:
            ValueError: none can be read: damaged, or of other shapes.
        """
        self._manager.wait_until_finished()
        step, problems = _newest(self._manager)
        restored = _read(self._manager, step, like(step))
        if problems and distributed.is_main():
            self._damaged.mkdir(exist_ok=True)
            for number, problem in problems.items():
                to = self._damaged / f"{number}-{time.time_ns()}"
                text = f"checkpoint {number} is damaged ({problem}); moved to {to}, resuming"
                _LOG.warning("%s from %d", text, step)
                os.replace(self._folder / str(number), to)
        if problems:  # their steps can be saved again
            distributed.main_first(self._manager.reload)
        return restored

    def close(self):
        """Waits for pending writes; raises as `save` does."""
        with self._written():
            self._manager.close()


def _shapes(tree: PyTree) -> dict[str, str]:
    """Describes each array of a tree by path."""
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    return {path_name(path): f"{x.dtype}{list(x.shape)}" for path, x in leaves}


def _contents(folder: Path, step: int) -> dict[str, int | str]:
    """Returns the number of a checkpoint, and the hashes of its files."""
    paths = [path for part in ("arrays", "beside") for path in sorted((folder / part).rglob("*"))]
    paths = [x for x in paths if x.is_file() and not x.name.startswith(_SYSTEM_FILES)]
    hashes = {str(x.relative_to(folder)): file_identity(x) for x in paths}
    return {"step": step, **hashes}


def _damage(folder: Path) -> str:
    """Returns what is wrong with the files of a checkpoint; empty if nothing is."""
    try:
        written, found = read_json_object(folder / _HASHES), _contents(folder, int(folder.name))
    except (OSError, UserError) as error:
        return str(error)
    changed = sorted(x for x in {*written, *found} if written.get(x) != found.get(x))
    return f"{changed[0]} has changed since it was written" if changed else ""


class Interrupt:
    """Notes the first SIGINT, SIGTERM or SIGHUP while active; a second acts as usual.

    A signal that is ignored, as SIGHUP is after `nohup`, stays so.

    Attributes:
        number: number of the signal; 0 before one arrives.
    """

    def __init__(self):
        self.number = 0
        self._before: dict[int, object] = {}

    def __enter__(self) -> "Interrupt":
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
                if signal.getsignal(number) != signal.SIG_IGN:
                    self._before[number] = signal.signal(number, self._note)
        return self

    def __exit__(self, *_):
        self._restore()

    @property
    def requested(self) -> bool:
        """Whether a signal has arrived."""
        return self.number > 0

    def _restore(self):
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self._before = {}

    def _note(self, number, frame):
        self.number = number
        self._restore()
        # Not print, as a handler may run in the middle of one. Whoever reads stderr may be gone, by
        # the same Ctrl-C.
        with contextlib.suppress(OSError):
            os.write(2, b"Stopping after this step; once more stops at once.\n")
