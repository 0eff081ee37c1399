"""Checkpoints of a run, ownership of the run's folder, and interruption by signals."""

import contextlib
import json
import logging
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

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

    This function changes no files, so it may be called while the run trains.

    Args:
        workdir: folder of the run.

    Returns:
        The checkpoint. A warning in the log names each later checkpoint that is damaged.

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
    """Opens a folder of checkpoints with Orbax.

    Each checkpoint has the arrays ("arrays") and a JSON object ("beside").

    Args:
        folder: the folder.
        options: options of the manager.

    Raises:
        UserError: a metadata file of Orbax is damaged.
    """
    handlers = {"arrays": ocp.StandardCheckpointHandler(), "beside": ocp.JsonCheckpointHandler()}
    try:
        return ocp.CheckpointManager(folder, options=options, item_handlers=handlers)
    except ValueError as error:  # Orbax found values of wrong types in a metadata file.
        raise UserError(
            f"{folder}: the file _CHECKPOINT_METADATA of a checkpoint is damaged; remove that "
            f"checkpoint: {error}"
        ) from error


def _newest(manager: ocp.CheckpointManager) -> tuple[int, dict[int, str]]:
    """Finds the latest undamaged checkpoint. In a run of several processes, all must call this.

    Args:
        manager: the opened folder.

    Returns:
        The step of the checkpoint, and the problem of each later, damaged checkpoint by its step.
        Only the main process has the texts of problems; the texts of all other processes are "".

    Raises:
        FileNotFoundError: there is no checkpoint.
        UserError: all checkpoints are damaged.
    """
    folder, problems = Path(manager.directory), {}
    for step in sorted(manager.all_steps(), reverse=True):
        # The main process checks the files, and its result decides for all processes.
        problem = _find_damage(folder / str(step)) if distributed.is_main() else ""
        is_damaged = distributed.any_process(bool(problem))
        if not is_damaged:
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
        step: number of updates of the checkpoint.
        template: arrays with the shapes, dtypes and shardings to restore to; None restores nested
            dictionaries to the first device.

    Raises:
        UserError: the checkpoint is damaged, or its arrays differ from the template.
    """
    description = f"checkpoint {step} of {manager.directory}"
    with naming(description, ValueError):  # Orbax raises ValueErrors for damaged files.
        saved_arrays = manager.item_metadata(step)["arrays"]
    if template is None:
        sharding = jax.sharding.SingleDeviceSharding(jax.devices()[0])
        targets = jax.tree.map(
            lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding),
            saved_arrays,
        )
    elif _describe_arrays(saved_arrays) == _describe_arrays(template):
        targets = jax.tree.map(ocp.utils.to_shape_dtype_struct, template)
    else:
        raise UserError(
            f"{description} was written by another version: its arrays have other names or shapes"
        )
    restore_args = ocp.args.Composite(
        arrays=ocp.args.StandardRestore(targets), beside=ocp.args.JsonRestore()
    )
    with naming(description, ValueError):
        restored: Any = manager.restore(step, args=restore_args)
    return Restored(step, restored.arrays, restored.beside)


def claim(workdir: Path, config: Settings, model: str, data: str) -> JsonObject:
    """Claims a folder for a run, or checks that the folder belongs to this run.

    The file run.json describes the run of a folder. It is binding once the folder has a checkpoint:
    a run may only resume with the same configuration, model and training file.

    Args:
        workdir: the folder; created if needed.
        config: settings of the run.
        model: hash of the frozen model, from `model_identity`.
        data: hash of the training file, from `file_identity`.

    Returns:
        The contents of run.json, including fields that other modules have added.

    Raises:
        UserError: the folder belongs to a run with another configuration, model or training file
            (the message lists all differences), or has checkpoints but no run.json.
    """
    path = workdir / RUN_FILE
    description = {"config": config.flat(), "model": model, "data": data}
    has_checkpoints = any(entry.name.isdigit() for entry in (workdir / FOLDER).glob("*"))
    # Only the main process writes the file. All other processes compare their run with the file.
    if not has_checkpoints and distributed.is_main():
        workdir.mkdir(parents=True, exist_ok=True)
        write_json(path, description)
        return description
    if has_checkpoints and not path.is_file():
        raise UserError(
            f"{workdir} has checkpoints but no {RUN_FILE}, so their run is unknown: give another "
            "--workdir, or remove the folder"
        )
    if not distributed.is_main():
        _await_shared(path)
    try:
        saved_description = read_json_object(path)
        changes = config.changes(saved_description["config"])
        changes += ["the frozen model"] if saved_description["model"] != model else []
        changes += ["the training file"] if saved_description["data"] != data else []
    except (UserError, KeyError, TypeError, AttributeError) as error:
        raise UserError(f"{path} is not the description of a run: {error!r}") from error
    if changes:
        raise UserError(
            f"{workdir} is the folder of another run; give another --workdir, or resume with the "
            "original settings. These differ:\n  " + "\n  ".join(changes)
        )
    return saved_description | description


def _await_shared(path: Path) -> None:
    """Waits until this process can see a file that the main process has written.

    Args:
        path: the file, in a folder that all processes should share.

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
    """Writes and restores the checkpoints of a run. Writes run in the background."""

    def __init__(self, workdir: Path, keep: int):
        """Opens workdir/checkpoints.

        Args:
            workdir: folder of the run.
            keep: number of checkpoints to keep. Older checkpoints are removed.
        """
        self._folder, self._damaged_folder = workdir / FOLDER, workdir / DAMAGED
        self._pending_step = -1  # Step of the latest `save`, which may still be running.
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
        """Starts to save the state after `step` updates, unless that checkpoint already exists.

        Args:
            step: number of updates.
            arrays: the state. The caller may donate the arrays after this method has returned.
            metadata: a JSON object to save with the arrays.

        Raises:
            UserError: this checkpoint or the previous checkpoint cannot be written, for example
                because the disk is full.
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
        """Converts errors of the file system, also in the background, to UserErrors."""
        try:
            yield
        except (OSError, ValueError) as error:  # TensorStore raises ValueErrors.
            is_system_error = any(code in str(error) for code in _SYSTEM_ERRORS)
            if not isinstance(error, OSError) and not is_system_error:
                raise
            # Drops TensorStore's long description of the array, and joins the lines.
            reason = " ".join(str(error).partition("[tensorstore_spec=")[0].split())
            problem = f"checkpoint {self._pending_step} cannot be written to {self._folder}"
            raise UserError(f"{problem}; earlier ones are kept: {reason}") from error

    def _write_hashes(self):
        """Adds a file with the hashes of all files to a new checkpoint.

        Orbax calls this method when the checkpoint is complete, but still has a temporary name.
        """
        if distributed.is_main():
            # The temporary name is the step and a suffix.
            (folder,) = self._folder.glob(f"{self._pending_step}.*")
            hashes = _hash_files(folder, self._pending_step)
            (folder / _HASHES).write_text(json.dumps(hashes, indent=1))

    def restore(self, make_template: Callable[[int], PyTree]) -> Restored:
        """Restores the latest undamaged checkpoint, and moves later checkpoints to workdir/damaged.

        In a run of several processes, all processes must call this method.

        Args:
            make_template: maps a number of updates to arrays with the shapes, dtypes and shardings
                to restore to.

        Returns:
            The checkpoint.

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
        if problems:
            # Otherwise the manager would still list the moved steps and refuse to save them again.
            distributed.main_first(self._manager.reload)
        return restored

    def close(self):
        """Waits for pending writes.

        Raises:
            UserError: a checkpoint cannot be written.
        """
        with self._write_errors():
            self._manager.close()


def _describe_arrays(tree: PyTree) -> dict[str, str]:
    """Returns dtype and shape of each array of a tree by its path, such as "float32[3, 4]"."""
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    return {path_name(path): f"{leaf.dtype}{list(leaf.shape)}" for path, leaf in leaves}


def _hash_files(folder: Path, step: int) -> dict[str, int | str]:
    """Computes the contents of a checkpoint's file `_HASHES`.

    Args:
        folder: folder of the checkpoint.
        step: number of updates of the checkpoint.

    Returns:
        The step, which detects a renamed checkpoint, and the hash of each file by its path in the
        folder.
    """
    paths = [path for item in ("arrays", "beside") for path in sorted((folder / item).rglob("*"))]
    paths = [path for path in paths if path.is_file() and not path.name.startswith(_SYSTEM_FILES)]
    hashes = {str(path.relative_to(folder)): file_identity(path) for path in paths}
    return {"step": step, **hashes}


def _find_damage(folder: Path) -> str:
    """Compares the files of a checkpoint with their saved hashes.

    Args:
        folder: folder of the checkpoint, named after its step.

    Returns:
        The first problem; "" for an undamaged checkpoint.
    """
    try:
        saved_hashes = read_json_object(folder / _HASHES)
        actual_hashes = _hash_files(folder, int(folder.name))
    except (OSError, UserError) as error:
        return str(error)
    for name in sorted({*saved_hashes, *actual_hashes}):
        if saved_hashes.get(name) != actual_hashes.get(name):
            return f"{name} has changed since it was written"
    return ""


class Interrupt:
    """Records the first SIGINT, SIGTERM or SIGHUP inside a `with` block.

    The first signal does not end the process: the run checks `requested` and stops by itself. A
    second signal has its usual effect. A signal that the process ignores, such as SIGHUP after
    `nohup`, is still ignored.

    Attributes:
        number: number of the recorded signal; 0 before a signal arrives.
    """

    def __init__(self):
        self.number = 0
        self._previous_handlers: dict[int, Any] = {}

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
        """Restores the handlers from before the `with` block."""
        for number, handler in self._previous_handlers.items():
            signal.signal(number, handler)
        self._previous_handlers = {}

    def _record(self, number, frame):
        """Handles the first signal, as a handler of `signal.signal`."""
        self.number = number
        self._restore()
        # The signal may have interrupted a `print`, so the handler must not use `print`. The write
        # fails if the same Ctrl-C has ended the program that reads stderr.
        with contextlib.suppress(OSError):
            os.write(2, b"Stopping after this step; once more stops at once.\n")
