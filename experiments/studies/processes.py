"""Runs several programs in parallel, each on some of the processors."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from stepprune_jax.parallel import distributed
from stepprune_jax.user_input import UserError

_POLL_SECONDS = 0.1  # Time between checks of the processes.
_LOG_LINES = 20  # Lines of a failed program's log in the error.


class Job(NamedTuple):
    """A program to run.

    Attributes:
        name: name for messages.
        command: the program with its arguments. `run_jobs` adds `--cpus` and the processors.
        log: file for the output.
        product: file that the program writes at its end.
    """

    name: str
    command: list[str]
    log: Path
    product: Path


def divide_processors(processes: int) -> list[list[int]]:
    """Returns the processors of each process. With too few processors, processes share them."""
    has_affinity = hasattr(os, "sched_getaffinity")
    cpus = sorted(os.sched_getaffinity(0)) if has_affinity else list(range(os.cpu_count() or 1))
    return [cpus[slot::processes] or [cpus[slot % len(cpus)]] for slot in range(processes)]


def run_jobs(jobs: Sequence[Job], processes: int) -> None:
    """Runs programs, up to `processes` in parallel.

    Raises:
        UserError: a program failed. The other programs are terminated.
    """
    waiting, free_cpus = list(jobs), divide_processors(processes)
    running: dict[subprocess.Popen, tuple[Job, list[int]]] = {}
    start_time = time.monotonic()
    with _exit_when_terminated():
        try:
            while waiting or running:
                while waiting and free_cpus:
                    job, cpus = waiting.pop(0), free_cpus.pop(0)
                    running[_start(job, cpus)] = job, cpus
                time.sleep(_POLL_SECONDS)
                for process in [process for process in running if process.poll() is not None]:
                    job, cpus = running.pop(process)
                    free_cpus.append(cpus)
                    _check(job, process.returncode)
                    remaining = len(waiting) + len(running)
                    num_done = len(jobs) - remaining
                    seconds = (time.monotonic() - start_time) / num_done * remaining
                    progress = f"{num_done} of {len(jobs)}, {seconds:.0f} s left"
                    distributed.say(f"trained {job.name} ({progress})")
        finally:
            for process in running:
                process.terminate()
            for process in running:
                process.wait()


@contextmanager
def _exit_when_terminated() -> Iterator[None]:
    """Makes SIGTERM raise SystemExit, so that `run_jobs` terminates the child processes."""
    previous = signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, previous)


def _start(job: Job, cpus: Sequence[int]) -> subprocess.Popen:
    job.log.parent.mkdir(parents=True, exist_ok=True)
    numbers = ", ".join(map(str, cpus))
    distributed.say(f"training {job.name} on processor(s) {numbers}: {job.log}")
    command = [*job.command, "--cpus", *map(str, cpus)]
    with job.log.open("a") as log:
        return subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT)


def _check(job: Job, code: int) -> None:
    if code == 0 and job.product.is_file():
        return
    lines = job.log.read_text(errors="replace").splitlines()[-_LOG_LINES:]
    problem = (
        f"failed with exit code {code}" if code else f"ended without writing {job.product.name}"
    )
    raise UserError(f"{job.name} {problem}; the end of {job.log}:\n" + "\n".join(lines))
