"""Says once that a command waits for jax's compiler, and why."""

import contextlib
import logging
import sys
import threading
from collections.abc import Iterator
from typing import Any

from stepprune_jax.cli.compile_cache import has_programs

_LOG = logging.getLogger("stepprune_jax.cli")
# Seconds of compiling before the message. Small models compile in a second or two, which needs no
# explanation.
_PATIENCE = 2.0
# Events of `jax.monitoring`. The first event ends the lowering of a program, and compiling begins.
_LOWERED = "/jax/core/compile/jaxpr_to_mlir_module_duration"
_COMPILED = "/jax/core/compile/backend_compile_duration"
_READ_FROM_CACHE = "/jax/compilation_cache/cache_hits"


class CompileNotice:
    """Listens to jax's events, and logs one line once compiling takes longer than `_PATIENCE`.

    The line appears while a program is still compiled. Programs from the cache do not count.
    """

    def __init__(self, had_programs: bool):
        """Creates a listener that has seen no event.

        Args:
            had_programs: whether earlier runs have stored programs in the cache of this user.
        """
        self._had_programs = had_programs
        self._seconds, self._is_done = 0.0, False  # Seconds of the compiled programs.
        self._is_cached = False  # Whether the current program came from the cache.
        self._timer: threading.Timer | None = None

    def record_duration(self, event: str, duration_secs: float, **_: Any) -> None:
        """Handles the end of a span of time."""
        if self._is_done:
            return
        if event == _LOWERED:
            self._cancel_timer()
            self._is_cached = False
            self._timer = threading.Timer(max(0.0, _PATIENCE - self._seconds), self._announce)
            self._timer.daemon = True  # Must not delay the end of the process.
            self._timer.start()
        elif event == _COMPILED:
            self._cancel_timer()
            self._seconds += 0.0 if self._is_cached else duration_secs
            if self._seconds > _PATIENCE:
                self._announce()

    def record_event(self, event: str, **_: Any) -> None:
        """Handles an event without a duration."""
        if event == _READ_FROM_CACHE:
            self._is_cached = True

    def close(self) -> None:
        """Ends the waiting for the current program."""
        self._is_done = True
        self._cancel_timer()

    def _cancel_timer(self) -> None:
        """Stops the timer of the current program, if any."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _announce(self) -> None:
        """Logs the message, the first time only. Also called by the thread of the timer."""
        if self._is_done:
            return
        self._is_done = True
        config = sys.modules["jax"].config
        folder = config.jax_compilation_cache_dir if config.jax_enable_compilation_cache else None
        if folder is None:
            reason = "compiled programs are not kept, so every run compiles them"
        elif self._had_programs:
            reason = f"{folder} has no programs of these shapes yet; later runs read them there"
        else:
            reason = f"no earlier run has stored any in {folder}; later runs read them there"
        _LOG.info("compiling programs, which may take a minute: %s", reason)


@contextlib.contextmanager
def announcing_compiles() -> Iterator[None]:
    """Logs one line if the programs of a command take long to compile.

    Does nothing for commands that run without jax.
    """
    jax = sys.modules.get("jax")
    if jax is None:
        yield
        return
    notice = CompileNotice(has_programs())
    jax.monitoring.register_event_duration_secs_listener(notice.record_duration)
    jax.monitoring.register_event_listener(notice.record_event)
    try:
        yield
    finally:
        notice.close()
        jax.monitoring.unregister_event_duration_listener(notice.record_duration)
        jax.monitoring.unregister_event_listener(notice.record_event)
