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

_WAIT = 0.5  # seconds between checks of the processes
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
    known = hasattr(os, "sched_getaffinity")
    cpus = sorted(os.sched_getaffinity(0)) if known else list(range(os.cpu_count() or 1))
    return [cpus[slot::processes] or [cpus[slot % len(cpus)]] for slot in range(processes)]


def run_jobs(jobs: Sequence[Job], processes: int) -> None:
    """Runs programs, several at a time."""
    slots: dict[int, tuple[Job, subprocess.Popen]] = {}
    waiting, cpus = list(jobs), shares(processes)
    begin, done = time.monotonic(), 0
    with _exit_when_terminated():
        try:
            while waiting or slots:
                for slot in range(processes):
                    if slot not in slots and waiting:
                        slots[slot] = (waiting[0], _start(waiting.pop(0), cpus[slot]))
                time.sleep(_WAIT)
                for slot, (job, process) in list(slots.items()):
                    if process.poll() is None:
                        continue
                    del slots[slot]
                    _check(job, process.returncode)
                    done += 1
                    left = (time.monotonic() - begin) / done * (len(jobs) - done)
                    progress = f"{done} of {len(jobs)}, {left:.0f} s left"
                    distributed.say(f"trained {job.name} ({progress})")
        finally:
            for _, process in slots.values():
                process.terminate()
            for _, process in slots.values():
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
    raise ValueError(f"{job.name} {what}; the end of {job.log}:\n" + "\n".join(lines))
