"""Keeps compiled programs of commands in a folder, and says in one line where it cannot.

The folder is jax's persistent compilation cache with a limit of its size. jax writes two files of
each program: the program itself, and the time of its last use. A process that is killed between
both, or a full disk, leaves a program without a time. jax would then refuse to keep any further
program, in every later process.
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

# The user's folder for what can be made again.
_CACHES = {"darwin": "~/Library/Caches", "win32": "~/AppData/Local"}
_MOST_BYTES = 4 << 30  # the least recently used programs are removed first
_PROGRAM, _TIME = "-cache", "-atime"  # the ends of jax's names of both files
_FAILURE = re.compile(r"Error (?:reading|writing) persistent compilation cache entry for '.*?': ")
_NO_CACHE = "pass --no_compile_cache"


def user_folder(environment: Mapping[str, str] = os.environ) -> Path | None:
    """Returns the folder for compiled programs, or None for a user without a home folder.

    Args:
        environment: variables of the environment. XDG_CACHE_HOME is read unless it is relative.

    Returns:
        The folder, which need not exist.
    """
    chosen = os.path.expanduser(environment.get("XDG_CACHE_HOME", ""))
    default = os.path.expanduser(_CACHES.get(sys.platform, "~/.cache"))
    base = chosen if os.path.isabs(chosen) else default
    return Path(base) / "stepprune_jax" if os.path.isabs(base) else None


def keep_programs() -> None:
    """Makes jax keep compiled programs in `user_folder`, unless jax has a folder for them already.

    A warning says once why programs are not kept, and what to do.
    """
    jax = sys.modules["jax"]  # scoring needs none: a command that compiles has imported it
    if not jax.config.jax_enable_compilation_cache:
        return
    warnings.showwarning = explain_failures(warnings.showwarning)
    if jax.config.jax_compilation_cache_dir is not None:
        return
    folder = user_folder()
    problem = "there is no home folder" if folder is None else _prepare(folder)
    if problem:
        remedy = f"set XDG_CACHE_HOME to a folder that can be written to, or {_NO_CACHE}"
        _LOG.warning("compiled programs are not kept, because %s: %s", problem, remedy)
        return
    jax.config.update("jax_compilation_cache_dir", str(folder))
    jax.config.update("jax_compilation_cache_max_size", _MOST_BYTES)
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.1)


def _prepare(folder: Path) -> str:
    """Creates the folder and removes incomplete programs; returns what prevents its use, or ""."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        remove_incomplete(folder)
    except OSError as error:
        return str(error)
    return "" if os.access(folder, os.W_OK | os.X_OK) else f"{folder} cannot be written to"


def remove_incomplete(folder: Path) -> None:
    """Removes programs without the time of their last use.

    Another process may write such a program at this moment, which then compiles it once more.
    """
    names = {entry.name for entry in os.scandir(folder)}
    for name in names:
        key = name.removesuffix(_PROGRAM)
        if key != name and key + _TIME not in names:
            with contextlib.suppress(OSError):
                (folder / name).unlink()


def explain_failures(show: Callable[..., None]) -> Callable[..., None]:
    """Wraps a function for `warnings.showwarning`, which shows jax's failures with the folder.

    jax warns again for each program. The first of these warnings becomes a line of the log with a
    remedy, and later ones are not shown.

    Args:
        show: the function, which shows all other warnings.

    Returns:
        The function to set in its place.
    """
    if getattr(show, "explains_failures", False):
        return show
    was_shown = False

    def show_once(message: Warning | str, *place: object, **options: object) -> None:
        nonlocal was_shown
        failure = _FAILURE.match(str(message))
        if failure is None:
            show(message, *place, **options)
            return
        folder = sys.modules["jax"].config.jax_compilation_cache_dir
        if folder == str(user_folder()):
            with contextlib.suppress(OSError):
                remove_incomplete(Path(folder))
        if not was_shown:
            was_shown, reason = True, str(message)[failure.end() :]
            remedy = f"make room for this folder, remove it, or {_NO_CACHE}"
            _LOG.warning("compiled programs are not kept in %s (%s): %s", folder, reason, remedy)

    show_once.explains_failures = True
    return show_once
