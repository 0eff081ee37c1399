"""One program at a time in a run's folder."""

import contextlib
import errno
import logging
import os
import socket
from collections.abc import Iterator
from pathlib import Path

try:
    import fcntl
except ModuleNotFoundError:  # on Windows
    fcntl = None

from stepprune_jax.data.json_files import file_named
from stepprune_jax.parallel import distributed
from stepprune_jax.user_input import UserError, require

_LOG = logging.getLogger(__name__)

LOCK_FILE = "run.lock"


@contextlib.contextmanager
def locked(workdir: Path) -> Iterator[None]:
    """Locks a folder, so that a second program that writes there is rejected.

    The lock is the operating system's and ends with the process; its file remains and names the
    latest holder. A folder created for it is removed if an error leaves nothing else in it. With
    several processes of one run the main one holds the lock, and all of them must call this.

    Raises:
        UserError: another process has the lock, or the operating system is Windows.
    """
    systems = "training and evaluation run on Linux and macOS; on Windows, use WSL"
    require(fcntl is not None, systems)
    with contextlib.ExitStack() as stack:
        distributed.main_first(lambda: distributed.is_main() and _take(workdir, stack))
        yield


def _take(workdir: Path, stack: contextlib.ExitStack) -> None:
    """Takes the lock, until the stack is closed."""
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
        problem = f"{path} cannot be locked ({error.strerror})"
        _LOG.warning("%s: run one program at a time in this folder", problem)
    with file_named(path):
        os.ftruncate(file, 0)
        os.pwrite(file, f"process {os.getpid()} on {socket.gethostname()}\n".encode(), 0)


def _remove(path: Path) -> None:
    """Removes a lock's file and its folder, if that holds nothing else."""
    if [*path.parent.iterdir()] == [path]:
        path.unlink()
        path.parent.rmdir()
