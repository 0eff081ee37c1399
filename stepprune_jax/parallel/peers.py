"""Reports which process of a run was lost.

A process that is stopped, or whose machine fails, leaves the others waiting until jax ends them
with an error about its own service. Each process sends heartbeats through the coordination
service's store, and reports the processes it has not heard from.
"""

import atexit
import logging
import socket
import threading
import time
from collections.abc import Callable
from typing import Protocol, runtime_checkable

_LOG = logging.getLogger(__name__)

_BEAT_SECONDS, _SILENT_SECONDS = 5.0, 30.0
_DONE = "done"


@runtime_checkable
class Store(Protocol):
    """The part of jax's client of its coordination service that is used here."""

    def key_value_set(self, key: str, value: str, allow_overwrite: bool = False) -> None:
        """Sets a value that all processes can read."""

    def key_value_try_get(self, key: str) -> str:
        """Returns a value, or raises if there is none."""


class Peers:
    """Heartbeats of the processes of a run, as seen by one of them."""

    def __init__(
        self,
        store: Store,
        index: int,
        count: int,
        say: Callable[[str], None],
        clock: Callable[[], float] = time.monotonic,
    ):
        """Starts to measure silence.

        Args:
            store: store shared by all processes.
            index: index of this process.
            count: count of processes.
            say: called with a line about a process.
            clock: returns a time in seconds.
        """
        self._store, self._index, self._say, self._clock = store, index, say, clock
        self._me = f"on {socket.gethostname()}"
        self._beats = 0
        self._heard = {peer: ("", clock()) for peer in range(count) if peer != index}
        self._lost: set[int] = set()

    def beat(self) -> None:
        """Sends a heartbeat, and reports processes that are silent.

        Raises:
            RuntimeError: the store cannot be reached.
        """
        self._beats += 1
        self._store.key_value_set(_key(self._index), f"{self._beats} {self._me}", True)
        for peer, (before, since) in self._heard.items():
            try:
                value = self._store.key_value_try_get(_key(peer))
            except RuntimeError as error:
                if "NOT_FOUND" not in str(error):
                    raise
                value = ""
            if value != before:
                self._heard[peer] = (value, self._clock())
                if peer in self._lost:
                    self._lost.remove(peer)
                    self._say(f"process {peer} of this run is back")
            elif value != _DONE and peer not in self._lost:
                silent = self._clock() - since
                if silent >= _SILENT_SECONDS:
                    self._lost.add(peer)
                    where = before.partition(" ")[2] or "on an unknown host"
                    self._say(
                        f"process {peer} of this run, {where}, has not responded for "
                        f"{silent:.0f} s: it was stopped or lost. Without it this process will "
                        "end as well; the same command resumes from the last checkpoint"
                    )

    def leave(self) -> None:
        """Tells the others that this process ends regularly."""
        self._store.key_value_set(_key(self._index), _DONE, True)


def watch(store: Store, index: int, count: int) -> None:
    """Sends heartbeats in the background until this process ends.

    Args:
        store: store shared by all processes.
        index: index of this process.
        count: count of processes.
    """
    peers, ended = Peers(store, index, count, _LOG.warning), threading.Event()

    def run() -> None:
        try:
            while not ended.wait(_BEAT_SECONDS):
                peers.beat()
            peers.leave()
        except RuntimeError as error:
            if not ended.is_set():
                reason = " ".join(str(error).split())[:200]
                _LOG.warning(
                    "process 0 of this run, which the others depend on, is lost: %s",
                    reason,
                )

    thread = threading.Thread(target=run, name="peers", daemon=True)
    thread.start()

    def stop() -> None:
        ended.set()
        thread.join(_BEAT_SECONDS)

    atexit.register(stop)  # after jax's own, so before it


def _key(process: int) -> str:
    return f"stepprune_jax/alive/{process}"
