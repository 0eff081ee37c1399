"""Checkpoints of a run, the description of its folder, and interruption by signals."""

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
# File with the hashes of a checkpoint's files. Orbax does not detect changed bits.
_HASHES = "hashes.json"
# Seconds that a process waits for a file of the main process. NFS may delay files by a minute.
_FILE_TIMEOUT = 60
# Prefixes of files that operating systems add: macOS on foreign disks, and NFS.
_SYSTEM_FILES = ("._", ".DS_Store", ".nfs")
# Parts of TensorStore's messages about a full disk, missing permissions, and system errors.
_SYSTEM_ERRORS = ("RESOURCE_EXHAUSTED", "PERMISSION_DENIED", "os_error_code")


class Restored(NamedTuple):
    """A restored checkpoint.

    Attributes:
        step: number of updates.
        arrays: the state of the run.
        metadata: the JSON object that was saved with the arrays.
    """

    step: int
    arrays: PyTree
    metadata: JsonObject


def read_latest(workdir: Path) -> Restored:
    """Reads the latest undamaged checkpoint to the first device, as nested dictionaries.

    Changes no files, so it may be called while the run trains.

    Args:
        workdir: folder of the run.

    Raises:
        FileNotFoundError: the folder has no checkpoint.
        UserError: all checkpoints are damaged.
    """
    folder = workdir / FOLDER
    if not folder.is_dir():
        raise FileNotFoundError(f"{workdir} has no {FOLDER}/: expected the --workdir of train.py")
    options = ocp.CheckpointManagerOptions(read_only=True)
    with contextlib.closing(_open(folder, options)) as manager:
        step, problems = _newest(manager)
        for damaged_step, problem in problems.items():
            description = f"checkpoint {damaged_step} of {folder} is damaged ({problem})"
            _LOG.warning("%s; using checkpoint %d", description, step)
        return _read(manager, step)


def _open(folder: Path, options: ocp.CheckpointManagerOptions) -> ocp.CheckpointManager:
    """Opens a folder of checkpoints, which have arrays and a JSON object each."""
    handlers = {"arrays": ocp.StandardCheckpointHandler(), "beside": ocp.JsonCheckpointHandler()}
    try:
        return ocp.CheckpointManager(folder, options=options, item_handlers=handlers)
    except ValueError as error:  # Orbax found values of wrong types in a metadata file.
        raise UserError(
            f"{folder}: the file _CHECKPOINT_METADATA of a checkpoint is damaged; remove that "
            f"checkpoint: {error}"
        ) from error


def _newest(manager: ocp.CheckpointManager) -> tuple[int, dict[int, str]]:
    """Returns the step of the latest undamaged checkpoint, and the problem of each later step.

    Raises:
        FileNotFoundError: there is no checkpoint.
        UserError: all checkpoints are damaged.
    """
    folder, problems = Path(manager.directory), {}
    for step in sorted(manager.all_steps(), reverse=True):
        problem = _find_damage(folder / str(step)) if distributed.is_main() else ""
        if not distributed.any_process(bool(problem)):
            return step, problems
        problems[step] = problem
    if not problems:
        raise FileNotFoundError(f"{folder} holds no checkpoint yet")
    descriptions = "; ".join(f"{step} is damaged: {problem}" for step, problem in problems.items())
    raise UserError(
        f"no checkpoint in {folder} can be read ({descriptions}). Remove it to start over"
    )


def _read(manager: ocp.CheckpointManager, step: int, template: PyTree = None) -> Restored:
    """Reads a checkpoint.

    Args:
        manager: the opened folder.
        step: the checkpoint.
        template: arrays with the shapes, dtypes and shardings to restore to; None restores nested
            dictionaries to the first device.

    Raises:
        UserError: the checkpoint is damaged, or its arrays differ from the template.
    """
    with naming(f"checkpoint {step} of {manager.directory}", ValueError):  # Raised by Orbax.
        metadata = manager.item_metadata(step)["arrays"]
    if template is None:
        device = jax.sharding.SingleDeviceSharding(jax.devices()[0])
        targets = jax.tree.map(
            lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=device), metadata
        )
    elif _shapes(metadata) == _shapes(template):
        targets = jax.tree.map(ocp.utils.to_shape_dtype_struct, template)
    else:
        raise UserError(
            f"checkpoint {step} of {manager.directory} was written by another version: its arrays "
            "have other names or shapes"
        )
    restore_args = ocp.args.Composite(
        arrays=ocp.args.StandardRestore(targets), beside=ocp.args.JsonRestore()
    )
    with naming(f"checkpoint {step} of {manager.directory}", ValueError):
        restored = manager.restore(step, args=restore_args)
    return Restored(step, restored.arrays, restored.beside)


def claim(workdir: Path, config: Settings, model: str, data: str) -> JsonObject:
    """Claims a folder for a run, or verifies that the run owns the folder.

    A run owns a folder once there is a checkpoint. Before its first checkpoint, a run may change
    its configuration.

    Args:
        workdir: the folder; created if needed.
        config: settings of the run.
        model: `model_identity` of the frozen model.
        data: `file_identity` of the training file.

    Returns:
        The description of the run in run.json, including fields that other modules added.

    Raises:
        UserError: the folder belongs to a run with another configuration, model or training file
            (the message lists all differences), or has checkpoints but no run.json.
    """
    path = workdir / RUN_FILE
    run = {"config": config.flat(), "model": model, "data": data}
    has_checkpoints = any(entry.name.isdigit() for entry in (workdir / FOLDER).glob("*"))
    # Only the main process writes the file. All other processes compare their run with the file.
    if not has_checkpoints and distributed.is_main():
        workdir.mkdir(parents=True, exist_ok=True)
        write_json(path, run)
        return run
    if has_checkpoints and not path.is_file():
        raise UserError(
            f"{workdir} has checkpoints but no {RUN_FILE}, so their run is unknown: give another "
            "--workdir, or remove the folder"
        )
    if not distributed.is_main():
        _await_shared(path)
    try:
        previous = read_json_object(path)
        changes = config.changes(previous["config"])
        changes += ["the frozen model"] if previous["model"] != model else []
        changes += ["the training file"] if previous["data"] != data else []
    except (UserError, KeyError, TypeError, AttributeError) as error:
        raise UserError(f"{path} is not the description of a run: {error!r}") from error
    if changes:
        raise UserError(
            f"{workdir} is the folder of another run; give another --workdir, or resume with the "
            "original settings. These differ:\n  " + "\n  ".join(changes)
        )
    return previous | run


def _await_shared(path: Path) -> None:
    """Waits until a file of the main process is visible to this process.

    Raises:
        UserError: the file is still missing after `_FILE_TIMEOUT` seconds.
    """
    for _ in range(_FILE_TIMEOUT):
        if path.is_file():
            return
        time.sleep(1)
    raise UserError(
        f"no file at {path}, which process 0 of this run has written: expected a --workdir that "
        "all processes share"
    )


class Checkpoints:
    """The checkpoints of a run, by number of updates. They are written in the background."""

    def __init__(self, workdir: Path, keep: int):
        """Opens workdir/checkpoints.

        Args:
            workdir: folder of the run.
            keep: number of checkpoints to keep; older ones are removed.
        """
        self._folder, self._damaged_folder = workdir / FOLDER, workdir / DAMAGED
        self._pending_step = -1
        options = ocp.CheckpointManagerOptions(
            max_to_keep=keep,
            cleanup_tmp_directories=True,
            async_options=ocp.options.AsyncOptions(post_finalization_callback=self._write_hashes),
        )
        self._manager = _open(self._folder, options)

    @property
    def latest(self) -> int | None:
        """Number of updates of the latest complete checkpoint, or None."""
        return self._manager.latest_step()

    def save(self, step: int, arrays: PyTree, metadata: JsonObject | None = None):
        """Starts to save the state after `step` updates, unless it is already saved.

        Args:
            step: number of updates.
            arrays: the state. The caller may donate the arrays after this method has returned.
            metadata: a JSON object to save with the arrays.

        Raises:
            UserError: this checkpoint or the previous one cannot be written, for example because
                the disk is full.
        """
        if step == self.latest:
            return
        save_args = ocp.args.Composite(
            arrays=ocp.args.StandardSave(arrays), beside=ocp.args.JsonSave(metadata or {})
        )
        with self._write_errors():
            self._manager.wait_until_finished()
            self._pending_step = step
            self._manager.save(step, args=save_args)

    @contextlib.contextmanager
    def _write_errors(self) -> Iterator[None]:
        """Raises errors of immediate and background writes as UserErrors."""
        try:
            yield
        except (OSError, ValueError) as error:  # TensorStore raises ValueErrors.
            is_system_error = any(code in str(error) for code in _SYSTEM_ERRORS)
            if not isinstance(error, OSError) and not is_system_error:
                raise
            reason = " ".join(str(error).partition("[tensorstore_spec=")[0].split())
            problem = f"checkpoint {self._pending_step} cannot be written to {self._folder}"
            raise UserError(f"{problem}; earlier ones are kept: {reason}") from error

    def _write_hashes(self):
        """Adds the hashes of all files to a checkpoint, before Orbax renames it to its number."""
        if distributed.is_main():
            (folder,) = self._folder.glob(f"{self._pending_step}.*")
            hashes = _hash_files(folder, self._pending_step)
            (folder / _HASHES).write_text(json.dumps(hashes, indent=1))

    def restore(self, make_template: Callable[[int], PyTree]) -> Restored:
        """Restores the latest undamaged checkpoint, and moves later ones to workdir/damaged.

        Args:
            make_template: maps a number of updates to arrays with the shapes, dtypes and shardings
                to restore to.

        Raises:
            UserError: all checkpoints are damaged, or the arrays differ from the template.
        """
        self._manager.wait_until_finished()
        step, problems = _newest(self._manager)
        restored = _read(self._manager, step, make_template(step))
        if problems and distributed.is_main():
            self._damaged_folder.mkdir(exist_ok=True)
            for damaged_step, problem in problems.items():
                destination = self._damaged_folder / f"{damaged_step}-{time.time_ns()}"
                description = f"checkpoint {damaged_step} is damaged ({problem})"
                _LOG.warning("%s; moved to %s, resuming from %d", description, destination, step)
                os.replace(self._folder / str(damaged_step), destination)
        if problems:  # Otherwise the manager would refuse to save these steps again.
            distributed.main_first(self._manager.reload)
        return restored

    def close(self):
        """Waits for pending writes.

        Raises:
            UserError: a checkpoint cannot be written.
        """
        with self._write_errors():
            self._manager.close()


def _shapes(tree: PyTree) -> dict[str, str]:
    """Returns the dtype and the shape of each array of a tree, by path."""
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    return {path_name(path): f"{leaf.dtype}{list(leaf.shape)}" for path, leaf in leaves}


def _hash_files(folder: Path, step: int) -> dict[str, int | str]:
    """Returns the step of a checkpoint, and the hashes of its files by relative path."""
    paths = [path for part in ("arrays", "beside") for path in sorted((folder / part).rglob("*"))]
    paths = [path for path in paths if path.is_file() and not path.name.startswith(_SYSTEM_FILES)]
    hashes = {str(path.relative_to(folder)): file_identity(path) for path in paths}
    return {"step": step, **hashes}


def _find_damage(folder: Path) -> str:
    """Returns the problem of a checkpoint's files, or "" for an undamaged checkpoint."""
    try:
        expected, actual = read_json_object(folder / _HASHES), _hash_files(folder, int(folder.name))
    except (OSError, UserError) as error:
        return str(error)
    changed = sorted(
        name for name in {*expected, *actual} if expected.get(name) != actual.get(name)
    )
    return f"{changed[0]} has changed since it was written" if changed else ""


class Interrupt:
    """Records the first SIGINT, SIGTERM or SIGHUP inside a `with` block.

    A second signal has its usual effect. A signal that is ignored, such as SIGHUP after `nohup`,
    is still ignored.

    Attributes:
        number: number of the signal; 0 before a signal arrives.
    """

    def __init__(self):
        self.number = 0
        self._previous_handlers: dict[int, object] = {}

    def __enter__(self) -> "Interrupt":
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
                if signal.getsignal(number) != signal.SIG_IGN:
                    self._previous_handlers[number] = signal.signal(number, self._record)
        return self

    def __exit__(self, *_):
        self._restore()

    @property
    def requested(self) -> bool:
        """Whether a signal has arrived."""
        return self.number > 0

    def _restore(self):
        for number, handler in self._previous_handlers.items():
            signal.signal(number, handler)
        self._previous_handlers = {}

    def _record(self, number, frame):
        """Handles the first signal."""
        self.number = number
        self._restore()
        # A signal handler may interrupt a `print`, so it must not print itself. The same Ctrl-C may
        # have ended the reader of stderr.
        with contextlib.suppress(OSError):
            os.write(2, b"Stopping after this step; once more stops at once.\n")
