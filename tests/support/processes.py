"""Processes that a test has started."""

LONGEST = 600  # seconds, ten times what a pair takes on two idle cores


def outputs(processes):
    """Waits for processes, and returns what each printed; none outlives the test."""
    try:
        return [process.communicate(timeout=LONGEST)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.communicate()
