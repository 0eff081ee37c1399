"""Locks the folder of a run, so that one program at a time writes there."""

import contextlib
import errno
import logging
import os
import socket
from collections.abc import Iterator
from pathlib import Path

try:
    import fcntl
except ModuleNotFoundError:  # Windows has no fcntl.
    fcntl = None

from stepprune_jax.data.json_files import file_named
from stepprune_jax.parallel import distributed
from stepprune_jax.user_input import UserError

_LOG = logging.getLogger(__name__)

LOCK_FILE = "run.lock"


@contextlib.contextmanager
def locked(workdir: Path) -> Iterator[None]:
    """Locks a folder inside a `with` block, so that a second program cannot write there.

    The operating system releases the lock when the process ends. The lock file remains and names
    the latest holder. If the block fails and the folder has no other file, a folder that was
    created for the lock is removed. In a run of several processes, the main process holds the lock,
    and every process must call this function.

    Raises:
        UserError: another process has the lock, or the operating system is Windows.
    """
    if fcntl is None:
        raise UserError("training and evaluation run on Linux and macOS; on Windows, use WSL")
    with contextlib.ExitStack() as stack:
        distributed.main_first(lambda: distributed.is_main() and _acquire(workdir, stack))
        yield


def _acquire(workdir: Path, stack: contextlib.ExitStack) -> None:
    """Acquires the lock, which `stack` releases when it closes."""
    path = workdir / LOCK_FILE
    if not workdir.exists():
        workdir.mkdir(parents=True, exist_ok=True)
        stack.push(lambda error, *_: _remove(path) if error else None)
    file = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
    stack.callback(os.close, file)
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        holder = os.pread(file, 200, 0).decode(errors="replace").strip() or "another process"
        raise UserError(
            f"{workdir} is in use by {holder}: wait until it ends, or give another --workdir"
        ) from error
    except OSError as error:
        if error.errno not in (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP):
            raise
        # The file system has no locks.
        problem = f"{path} cannot be locked ({error.strerror})"
        _LOG.warning("%s: run one program at a time in this folder", problem)
    with file_named(path):
        os.ftruncate(file, 0)
        os.pwrite(file, f"process {os.getpid()} on {socket.gethostname()}\n".encode(), 0)


def _remove(path: Path) -> None:
    """Removes a lock file and its folder, if the folder has no other file."""
    if [*path.parent.iterdir()] == [path]:
        path.unlink()
        path.parent.rmdir()
