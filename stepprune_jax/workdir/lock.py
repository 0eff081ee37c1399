"""Locks the folder of a run, so that only one program at a time writes there."""

import contextlib
import errno
import importlib
import logging
import os
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from stepprune_jax.data.json_files import file_named
from stepprune_jax.parallel import distributed
from stepprune_jax.user_input import UserError

try:
    fcntl: Any = importlib.import_module("fcntl")
except ModuleNotFoundError:  # Windows has no fcntl.
    fcntl = None

_LOG = logging.getLogger(__name__)

LOCK_FILE = "run.lock"


@contextlib.contextmanager
def locked(workdir: Path) -> Iterator[None]:
    """Locks a folder inside a `with` block, so that a second program cannot write there.

    The operating system releases the lock when the process ends. The lock file remains and names
    the process that held the lock last. A new folder is removed again if the block fails and has
    written no files. In a run of several processes, the main process holds the lock, and every
    process must call this function.

    Args:
        workdir: the folder; created if needed.

    Raises:
        UserError: another process holds the lock, or the operating system is Windows.
    """
    if fcntl is None:
        raise UserError("training and evaluation run on Linux and macOS; on Windows, use WSL")
    with contextlib.ExitStack() as stack:
        distributed.main_first(lambda: distributed.is_main() and _acquire(workdir, stack))
        yield


def _acquire(workdir: Path, stack: contextlib.ExitStack) -> None:
    """Acquires the lock of a folder, and writes the name of this process to the lock file.

    Args:
        workdir: the folder; created if needed.
        stack: releases the lock when it closes.

    Raises:
        UserError: another process holds the lock.
    """
    lock_file = workdir / LOCK_FILE
    if not workdir.exists():
        workdir.mkdir(parents=True, exist_ok=True)
        stack.push(lambda error_type, *_: _remove_unused(lock_file) if error_type else None)
    descriptor = os.open(lock_file, os.O_RDWR | os.O_CREAT, 0o666)
    stack.callback(os.close, descriptor)  # Closing the file releases its lock.
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        holder = os.pread(descriptor, 200, 0).decode(errors="replace").strip()
        raise UserError(
            f"{workdir} is in use by {holder or 'another process'}: wait until it ends, or give "
            "another --workdir"
        ) from error
    except OSError as error:
        if error.errno not in (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP):
            raise
        # The file system does not support locks.
        problem = f"{lock_file} cannot be locked ({error.strerror})"
        _LOG.warning("%s: run one program at a time in this folder", problem)
    with file_named(lock_file):
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, f"process {os.getpid()} on {socket.gethostname()}\n".encode(), 0)


def _remove_unused(lock_file: Path) -> None:
    """Removes a lock file and its folder, unless the folder has other files."""
    if [*lock_file.parent.iterdir()] == [lock_file]:
        lock_file.unlink()
        lock_file.parent.rmdir()
