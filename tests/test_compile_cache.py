"""The cache of compiled programs survives kills and full disks, or a warning explains why not."""

import contextlib
import errno
import os
import warnings
from pathlib import Path

import jax
import pytest
from jax._src.lru_cache import LRUCache
from processes import run_python

from stepprune_jax.checkpoints import hub
from stepprune_jax.cli import compile_cache
from stepprune_jax.cli.compile_cache import (
    explain_failures,
    keep_programs,
    remove_incomplete,
    user_folder,
)
from stepprune_jax.user_input import local_path

ROOT = Path(__file__).parents[1]


@pytest.fixture
def settings(monkeypatch):
    """Records changes of jax's configuration, with an enabled cache that has no folder."""
    changes, update = [], jax.config.update
    update("jax_enable_compilation_cache", True)
    monkeypatch.setattr(jax.config, "update", lambda *change: changes.append(change))
    yield changes
    update("jax_enable_compilation_cache", False)  # the value for all tests


def test_after_removing_incomplete_entries_the_cache_works_again(tmp_path):
    cache = LRUCache(str(tmp_path), max_size=1000)
    cache.put("complete", b"1")
    (tmp_path / "torn-cache").write_bytes(b"1")  # a process was killed between two writes
    with pytest.raises(FileNotFoundError, match="torn-atime"):
        cache.put("next", b"2")
    remove_incomplete(tmp_path)
    cache.put("next", b"2")
    assert (cache.get("complete"), cache.get("next"), cache.get("torn")) == (b"1", b"2", None)


def test_a_command_removes_incomplete_entries_when_it_starts(tmp_path, monkeypatch, settings):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    folder = tmp_path / "stepprune_jax"
    folder.mkdir()
    complete_names = {"complete-cache", "complete-atime", ".lockfile"}
    for name in ("torn-cache", *complete_names):
        (folder / name).touch()
    keep_programs()
    assert {path.name for path in folder.iterdir()} == complete_names
    assert ("jax_compilation_cache_dir", str(folder)) in settings


@pytest.mark.parametrize("case", ["a file", "read only"])
def test_one_warning_names_an_unusable_folder(tmp_path, monkeypatch, settings, capsys, case):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    if case == "a file":
        (tmp_path / "cache").touch()
    else:
        monkeypatch.setattr(os, "access", lambda *_: False)  # root may write to any folder
    keep_programs()
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("warning: compiled programs are not kept, because ")
    assert str(tmp_path / "cache") in line and "pass --no_compile_cache" in line
    assert not settings


def test_a_user_without_a_home_folder_has_no_cache(tmp_path, monkeypatch, settings, capsys):
    # Without HOME and without an entry in passwd, expanduser returns its argument.
    monkeypatch.setattr(os.path, "expanduser", str)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.chdir(tmp_path)
    keep_programs()
    assert user_folder() is None and not settings and not [*tmp_path.iterdir()]
    assert "because there is no home folder: set XDG_CACHE_HOME" in capsys.readouterr().err
    for path in ("~", "~/runs", Path("~/runs")):
        with pytest.raises(ValueError, match="this user has no home folder, expected a path with"):
            local_path(path)
    assert local_path("~runs/x") == Path("~runs/x")


def test_without_a_home_folder_downloads_need_hf_home(monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", "~/.cache/huggingface/hub")
    with pytest.raises(ValueError, match="a/b: there is no home folder for downloads, set HF_HOME"):
        hub.download(hub.Repository("a/b"), ["*.json"])


@pytest.mark.parametrize("folder", ["", "relative/folder"])
def test_a_relative_folder_in_the_environment_is_ignored(folder):
    expected = Path(os.path.expanduser("~/.cache/stepprune_jax"))
    assert user_folder({"XDG_CACHE_HOME": folder}) == expected


@contextlib.contextmanager
def jax_folder(folder):
    """Sets jax's cache folder, which the tests otherwise do not use."""
    old_folder = jax.config.jax_compilation_cache_dir
    jax.config.update("jax_compilation_cache_dir", str(folder))
    yield
    jax.config.update("jax_compilation_cache_dir", old_folder)


def test_one_warning_explains_all_failures_of_the_cache(monkeypatch, tmp_path, capsys):
    """jax warns about each program. Warnings about other things are passed on."""
    other_warnings = []
    monkeypatch.setattr(compile_cache, "user_folder", lambda: tmp_path)
    (tmp_path / "torn-cache").touch()
    note = lambda message, *_: other_warnings.append(str(message))  # noqa: E731
    with warnings.catch_warnings(), jax_folder(tmp_path):
        warnings.simplefilter("default")
        warnings.showwarning = explain_failures(note)
        warnings.showwarning = explain_failures(warnings.showwarning)
        error = OSError(errno.ENOSPC, "No space left on device")
        for action in ("writing", "reading"):
            for name in ("jit_f", "jit_g"):
                text = f"Error {action} persistent compilation cache entry for '{name}': OSError: "
                warnings.warn(f"{text}{error}", stacklevel=1)
        warnings.warn("another", stacklevel=1)
    (line,) = capsys.readouterr().err.splitlines()
    assert line == (
        f"warning: compiled programs are not kept in {tmp_path} (OSError: [Errno 28] No space left "
        "on device): make room for this folder, remove it, or pass --no_compile_cache"
    )
    assert other_warnings == ["another"] and not (tmp_path / "torn-cache").exists()


COMPILES = """
import jax, logging
from stepprune_jax.cli.command_line import Parser, show_messages
show_messages("stderr")
Parser(compiles=True).parse_args([])
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
for size in (2, 3):
    jax.jit(lambda x: x @ x)(jax.numpy.ones((size, size)))
"""


def test_the_warnings_of_jax_are_recognised_on_a_full_disk(tmp_path):
    """A file size limit of 0 bytes has the effect of a full disk."""
    code = "import resource, signal; signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
    code += "resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))\n" + COMPILES
    variables = {"XDG_CACHE_HOME": str(tmp_path), "JAX_ENABLE_COMPILATION_CACHE": "true"}
    process = run_python("-c", code, folder=ROOT, **variables)
    (line,) = process.stderr.splitlines()
    folder = tmp_path / "stepprune_jax"
    assert line.startswith(f"warning: compiled programs are not kept in {folder} (OSError: [Errno")
    assert process.returncode == 0 and not [*folder.glob("*-cache")]
