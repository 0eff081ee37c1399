"""Ctrl-C and SIGTERM: finish the update, save, leave."""

import os
import signal
import threading


class Interrupt:
    """While active, turns the first SIGINT or SIGTERM into a flag; a second one acts as usual."""

    def __init__(self):
        self.requested = False
        self._before: dict[int, object] = {}

    def __enter__(self) -> "Interrupt":
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM):
                self._before[number] = signal.signal(number, self._note)
        return self

    def __exit__(self, *_):
        self._restore()

    def _restore(self):
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self._before = {}

    def _note(self, number, frame):
        self.requested = True
        self._restore()
        # Not print: a handler may run in the middle of one.
        os.write(2, b"Stopping after this step; once more stops at once.\n")
