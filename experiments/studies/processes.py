"""Runs several programs at a time, each on its share of the processors."""

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

_WAIT = 0.1  # seconds between checks of the processes
_SHOWN = 20  # lines of a failed program's log


class Job(NamedTuple):
    """A program to run.

    Attributes:
        name: name for messages.
        command: the program with its arguments; `--cpus` and the processors are added.
        log: file for its output.
        product: file that it writes when finished.
    """

    name: str
    command: list[str]
    log: Path
    product: Path


def shares(processes: int) -> list[list[int]]:
    """Divides the processors of this process; if there are too few, processes share them."""
    has_affinity = hasattr(os, "sched_getaffinity")
    cpus = sorted(os.sched_getaffinity(0)) if has_affinity else list(range(os.cpu_count() or 1))
    return [cpus[slot::processes] or [cpus[slot % len(cpus)]] for slot in range(processes)]


def run_jobs(jobs: Sequence[Job], processes: int) -> None:
    """Runs programs, several at a time."""
    waiting, free = list(jobs), shares(processes)
    running: dict[subprocess.Popen, tuple[Job, list[int]]] = {}
    begin = time.monotonic()
    with _exit_when_terminated():
        try:
            while waiting or running:
                while waiting and free:
                    job, cpus = waiting.pop(0), free.pop(0)
                    running[_start(job, cpus)] = job, cpus
                time.sleep(_WAIT)
                for process in [process for process in running if process.poll() is not None]:
                    job, cpus = running.pop(process)
                    free.append(cpus)
                    _check(job, process.returncode)
                    remaining = len(waiting) + len(running)
                    done = len(jobs) - remaining
                    seconds = (time.monotonic() - begin) / done * remaining
                    progress = f"{done} of {len(jobs)}, {seconds:.0f} s left"
                    distributed.say(f"trained {job.name} ({progress})")
        finally:
            for process in running:
                process.terminate()
            for process in running:
                process.wait()


@contextmanager
def _exit_when_terminated() -> Iterator[None]:
    """Makes SIGTERM unwind the stack, so that child processes do not outlive this one."""
    before = signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _start(job: Job, cpus: Sequence[int]) -> subprocess.Popen:
    job.log.parent.mkdir(parents=True, exist_ok=True)
    on = ", ".join(map(str, cpus))
    distributed.say(f"training {job.name} on processor(s) {on}: {job.log}")
    command = [*job.command, "--cpus", *map(str, cpus)]
    with job.log.open("a") as log:
        return subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT)


def _check(job: Job, code: int) -> None:
    if code == 0 and job.product.is_file():
        return
    lines = job.log.read_text(errors="replace").splitlines()[-_SHOWN:]
    what = f"failed with exit code {code}" if code else f"ended without writing {job.product.name}"
    raise UserError(f"{job.name} {what}; the end of {job.log}:\n" + "\n".join(lines))
