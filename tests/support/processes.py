"""Processes that a test has started."""

import socket

LONGEST = 600  # seconds, ten times what a pair takes on two idle cores


def outputs(processes):
    """Waits for processes, and returns what each printed; none outlives the test."""
    try:
        return [process.communicate(timeout=LONGEST)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.communicate()


def free_port():
    """A port of this machine that nothing listens to."""
    with socket.socket() as found:
        found.bind(("localhost", 0))
        return found.getsockname()[1]
