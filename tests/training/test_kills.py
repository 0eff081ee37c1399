"""A run that is killed after an update or while it saves loses nothing."""

import json
import pathlib
import random
import subprocess
import sys
import time

import pytest
from tiny_run import metrics

SCRIPT = pathlib.Path(__file__).with_name("one_process.py")
TEMPORARY = "*.orbax-checkpoint-tmp*"


def run_until(command, log, should_kill):
    """Runs a command until `should_kill(start_time)` or its end; returns whether it was killed."""
    start_time = time.time()
    with log.open("a") as file, subprocess.Popen(command, stdout=file, stderr=file) as process:
        while process.poll() is None:
            if should_kill(start_time):
                process.kill()
                return True
            time.sleep(0.001)
    assert process.returncode == 0, log.read_text()
    return False


@pytest.mark.slow
def test_a_killed_run_equals_an_uninterrupted_run(world, tmp_path):
    num_steps, random_numbers, log = 40, random.Random(0), tmp_path / "log"
    uninterrupted, killed = tmp_path / "uninterrupted", tmp_path / "killed"

    def command(workdir):
        changes = json.dumps({"steps": num_steps})
        return [sys.executable, SCRIPT, "1", *world, workdir, changes]

    def has_logged(start_time, num_lines):
        path = killed / "metrics.jsonl"
        is_new = path.exists() and path.stat().st_mtime > start_time
        return is_new and path.read_text().count("\n") >= num_lines

    def is_saving(start_time):
        folders = (killed / "checkpoints").glob(TEMPORARY)
        try:
            return any(path.stat().st_mtime > start_time for path in folders)
        except FileNotFoundError:  # the folder has been renamed
            return False

    num_torn = 0
    for number in range(6):
        num_lines = 6 * number + random_numbers.randint(2, 6)

        def should_kill(start_time, number=number, num_lines=num_lines):
            return has_logged(start_time, num_lines) and (number % 2 or is_saving(start_time))

        assert run_until(command(killed), log, should_kill)
        num_torn += any((killed / "checkpoints").glob(TEMPORARY))
    assert num_torn  # some kills interrupted a save
    for workdir in (killed, uninterrupted):
        assert not run_until(command(workdir), log, lambda start_time: False)
    assert log.read_text().count("Resuming after step") >= 5
    assert len(metrics(uninterrupted)) == num_steps
    assert metrics(killed) == metrics(uninterrupted)
    name = "policy.safetensors"
    assert (killed / name).read_bytes() == (uninterrupted / name).read_bytes()
