"""Turns on jax's persistent compilation cache, with one warning if programs cannot be stored.

The cache is a folder with a size limit. jax writes two files for each program: the program itself,
and the time of its last use. A full disk, or a process that is killed between the two writes,
leaves a program without a time. Every later process would then fail to store programs, so this
module removes such programs.
"""

import contextlib
import logging
import os
import re
import sys
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path

_LOG = logging.getLogger("stepprune_jax.cli")

# The user's folder for caches, where it is not ~/.cache.
_CACHE_FOLDERS = {"darwin": "~/Library/Caches", "win32": "~/AppData/Local"}
# Bounds the disk space. jax removes the least recently used programs above this size.
_MAX_BYTES = 4 << 30
_PROGRAM_SUFFIX, _TIME_SUFFIX = "-cache", "-atime"  # Names of the files by jax.
_FAILURE = re.compile(r"Error (?:reading|writing) persistent compilation cache entry for '.*?': ")
_DISABLE_HINT = "pass --no_compile_cache"
_EXPLAINING: set[Callable[..., None]] = set()  # All results of `explain_failures`.


def user_folder(environment: Mapping[str, str] = os.environ) -> Path | None:
    """Returns the folder for compiled programs, or None for a user without a home folder.

    Args:
        environment: environment variables. XDG_CACHE_HOME is used if it is an absolute path.

    Returns:
        The folder, which may not exist yet.
    """
    xdg_folder = os.path.expanduser(environment.get("XDG_CACHE_HOME", ""))
    default_folder = os.path.expanduser(_CACHE_FOLDERS.get(sys.platform, "~/.cache"))
    cache_folder = xdg_folder if os.path.isabs(xdg_folder) else default_folder
    return Path(cache_folder) / "stepprune_jax" if os.path.isabs(cache_folder) else None


def has_programs() -> bool:
    """Returns whether earlier runs have stored programs in `user_folder`."""
    folder = user_folder()
    return folder is not None and any(folder.glob(f"*{_PROGRAM_SUFFIX}"))


def keep_programs() -> None:
    """Makes jax store compiled programs in `user_folder`, unless jax already has a cache folder.

    If programs cannot be stored, one warning has the reason and a remedy.
    """
    # This module does not import jax, because `stepprune-score` runs without jax. Commands that
    # compile programs have already imported jax.
    jax = sys.modules["jax"]
    if not jax.config.jax_enable_compilation_cache:
        return
    warnings.showwarning = explain_failures(warnings.showwarning)
    if jax.config.jax_compilation_cache_dir is not None:
        return
    folder = user_folder()
    problem = "there is no home folder" if folder is None else _prepare(folder)
    if problem:
        remedy = f"set XDG_CACHE_HOME to a folder that can be written to, or {_DISABLE_HINT}"
        _LOG.warning("compiled programs are not kept, because %s: %s", problem, remedy)
        return
    jax.config.update("jax_compilation_cache_dir", str(folder))
    jax.config.update("jax_compilation_cache_max_size", _MAX_BYTES)
    # Seconds. jax's default of 1 s would skip many programs, which together take long to compile.
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.1)


def _prepare(folder: Path) -> str:
    """Creates the cache folder if needed, and removes incomplete programs.

    Args:
        folder: the cache folder.

    Returns:
        The reason why the folder cannot be used; "" for a usable folder.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        remove_incomplete(folder)
    except OSError as error:
        return str(error)
    return "" if os.access(folder, os.W_OK | os.X_OK) else f"{folder} cannot be written to"


def remove_incomplete(folder: Path) -> None:
    """Removes programs without a file for the time of their last use.

    If another process is writing a program at this moment, its program may be removed as well. A
    later process then compiles that program again.

    Args:
        folder: the cache folder.
    """
    names = {entry.name for entry in os.scandir(folder)}
    for name in names:
        key = name.removesuffix(_PROGRAM_SUFFIX)
        if key != name and key + _TIME_SUFFIX not in names:
            with contextlib.suppress(OSError):
                (folder / name).unlink()


def explain_failures(show: Callable[..., None]) -> Callable[..., None]:
    """Wraps `warnings.showwarning` to explain jax's warnings about programs that it cannot store.

    jax warns once per program. The wrapper replaces the first of these warnings by a line of the
    log with the folder and a remedy, and hides all later ones.

    Args:
        show: the current value of `warnings.showwarning`, which shows all other warnings.

    Returns:
        The new value of `warnings.showwarning`; `show` itself if it is already such a wrapper.
    """
    if show in _EXPLAINING:
        return show
    has_warned = False

    def show_once(message: Warning | str, *location: object, **options: object) -> None:
        """Logs the first failure to store a program, and shows all other warnings."""
        nonlocal has_warned
        failure = _FAILURE.match(str(message))
        if failure is None:
            show(message, *location, **options)
            return
        folder = sys.modules["jax"].config.jax_compilation_cache_dir
        if folder == str(user_folder()):  # A folder that the user has chosen is not changed.
            with contextlib.suppress(OSError):
                remove_incomplete(Path(folder))
        if not has_warned:
            has_warned, reason = True, str(message)[failure.end() :]
            remedy = f"make room for this folder, remove it, or {_DISABLE_HINT}"
            _LOG.warning("compiled programs are not kept in %s (%s): %s", folder, reason, remedy)

    _EXPLAINING.add(show_once)
    return show_once
