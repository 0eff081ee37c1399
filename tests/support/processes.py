"""Helpers for processes that a test starts."""

import socket

# Time limit in seconds. A pair of processes takes a tenth of this on two idle cores.
LONGEST = 600


def outputs(processes):
    """Waits for processes and returns the output of each. Kills processes at the time limit."""
    try:
        return [process.communicate(timeout=LONGEST)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.communicate()


def free_port():
    """Returns the number of an unused port of this machine."""
    with socket.socket() as listener:
        listener.bind(("localhost", 0))
        return listener.getsockname()[1]
