"""A folder belongs to one process at a time, and a kill frees it."""

import errno
import fcntl
import importlib
import os
import signal
import socket
import subprocess
import sys

import pytest

from stepprune_jax.user_input import UserError
from stepprune_jax.workdir import lock
from stepprune_jax.workdir.lock import LOCK_FILE, locked

HOLD = (
    "import fcntl, sys, time; file = open(sys.argv[1], 'a'); fcntl.flock(file, fcntl.LOCK_EX);"
    "print('held', flush=True); time.sleep(60)"
)


def test_a_second_process_is_refused_until_the_first_ends(tmp_path):
    folder = tmp_path / "a" / "run"
    with locked(folder):
        with pytest.raises(ValueError) as refused, locked(folder):
            pass
        me = f"process {os.getpid()} on {socket.gethostname()}"
        assert str(refused.value).startswith(f"{folder} is in use by {me}: wait")
        assert isinstance(refused.value, UserError)
        with locked(tmp_path):  # another folder
            pass
    with locked(folder):
        pass


def test_a_lock_left_by_a_kill_does_not_block(tmp_path):
    (tmp_path / LOCK_FILE).write_text("process 1 on elsewhere\n")
    command = [sys.executable, "-S", "-c", HOLD, tmp_path / LOCK_FILE]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as holder:
        holder.stdout.readline()
        with pytest.raises(ValueError, match="in use by process 1 on elsewhere"), locked(tmp_path):
            pass
        holder.send_signal(signal.SIGKILL)
    with locked(tmp_path):
        assert (tmp_path / LOCK_FILE).read_text().split()[1] == str(os.getpid())


def test_a_file_system_without_locks_gets_a_warning(tmp_path, monkeypatch, capsys):
    def refuse(*_):
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", refuse)
    with locked(tmp_path):
        pass
    assert "cannot be locked (No locks available)" in capsys.readouterr().err


def test_windows_has_one_line_instead_of_a_traceback(tmp_path, monkeypatch):
    """Windows has no module fcntl."""
    monkeypatch.setitem(sys.modules, "fcntl", None)
    windows, line = importlib.reload(lock), "run on Linux and macOS; on Windows, use WSL"
    with pytest.raises(UserError, match=line), windows.locked(tmp_path / "run"):
        pass
    assert not (tmp_path / "run").exists()
    monkeypatch.undo()
    importlib.reload(lock)


def test_a_lock_that_is_no_file_is_named(tmp_path):
    os.mkfifo(tmp_path / LOCK_FILE)
    with pytest.raises(OSError, match=f"'{tmp_path}/{LOCK_FILE}'"), locked(tmp_path):
        pass
