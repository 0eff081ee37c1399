"""Locks of run folders."""

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
        with pytest.raises(ValueError) as error, locked(folder):
            pass
        holder = f"process {os.getpid()} on {socket.gethostname()}"
        assert str(error.value).startswith(f"{folder} is in use by {holder}: wait")
        assert isinstance(error.value, UserError)
        with locked(tmp_path):  # Another folder is free.
            pass
    with locked(folder):
        pass


def test_a_killed_process_does_not_keep_its_lock(tmp_path):
    (tmp_path / LOCK_FILE).write_text("process 1 on elsewhere\n")
    command = [sys.executable, "-S", "-c", HOLD, tmp_path / LOCK_FILE]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as holder:
        holder.stdout.readline()
        with pytest.raises(ValueError, match="in use by process 1 on elsewhere"), locked(tmp_path):
            pass
        holder.send_signal(signal.SIGKILL)
    with locked(tmp_path):
        assert (tmp_path / LOCK_FILE).read_text().split()[1] == str(os.getpid())


def test_a_file_system_without_locks_is_a_warning(tmp_path, monkeypatch, capsys):
    def refuse(*_):
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", refuse)
    with locked(tmp_path):
        pass
    assert "cannot be locked (No locks available)" in capsys.readouterr().err


def test_windows_is_a_user_error(tmp_path, monkeypatch):
    """Windows has no module fcntl."""
    monkeypatch.setitem(sys.modules, "fcntl", None)
    windows, line = importlib.reload(lock), "run on Linux and macOS; on Windows, use WSL"
    with pytest.raises(UserError, match=line), windows.locked(tmp_path / "run"):
        pass
    assert not (tmp_path / "run").exists()
    monkeypatch.undo()
    importlib.reload(lock)


def test_an_error_of_the_lock_file_names_the_file(tmp_path):
    os.mkfifo(tmp_path / LOCK_FILE)
    with pytest.raises(OSError, match=f"'{tmp_path}/{LOCK_FILE}'"), locked(tmp_path):
        pass
