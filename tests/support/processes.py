"""Helpers for processes that a test starts."""

import os
import socket
import subprocess
import sys

# Time limit in seconds. A pair of processes takes a tenth of this on two idle cores.
LONGEST = 600


def run_python(*arguments, folder=None, **environment):
    """Runs Python in a separate process without input, and waits for its end."""
    return subprocess.run(
        [sys.executable, *map(str, arguments)],
        cwd=folder,
        env=os.environ | environment,
        input="",
        capture_output=True,
        text=True,
        timeout=LONGEST,
    )


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


def run_processes(commands):
    """Runs commands as the processes of one run; returns their exit codes and outputs."""
    variables = {"JAX_COORDINATOR_ADDRESS": f"localhost:{free_port()}"}
    variables["JAX_NUM_PROCESSES"] = str(len(commands))
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    processes = [
        subprocess.Popen(command, env=os.environ | variables | {"JAX_PROCESS_ID": str(n)}, **pipes)
        for n, command in enumerate(commands)
    ]
    texts = outputs(processes)
    return [process.returncode for process in processes], texts
