"""A run that is killed, after a step or in the middle of saving, loses nothing."""

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


def attempt(command, log, hit):
    """Runs until `hit(since)`, or to the end; returns whether it was killed."""
    since = time.time()
    with log.open("a") as file, subprocess.Popen(command, stdout=file, stderr=file) as process:
        while process.poll() is None:
            if hit(since):
                process.kill()
                return True
            time.sleep(0.001)
    assert process.returncode == 0, log.read_text()
    return False


@pytest.mark.slow
def test_a_killed_run_learns_what_an_uninterrupted_one_does(world, tmp_path):
    steps, chance, log, torn = 40, random.Random(0), tmp_path / "log", 0
    whole, killed = tmp_path / "whole", tmp_path / "killed"

    def command(workdir):
        return [sys.executable, SCRIPT, "1", *world, workdir, json.dumps({"steps": steps})]

    def logged(since, least):
        path = killed / "metrics.jsonl"
        new = path.exists() and path.stat().st_mtime > since
        return new and path.read_text().count("\n") >= least

    def saving(since):
        try:
            return any(
                path.stat().st_mtime > since for path in (killed / "checkpoints").glob(TEMPORARY)
            )
        except FileNotFoundError:  # it has been renamed
            return False

    for number in range(6):
        least = 6 * number + chance.randint(2, 6)

        def hit(since, number=number, least=least):
            return logged(since, least) and (number % 2 or saving(since))

        assert attempt(command(killed), log, hit)
        torn += any((killed / "checkpoints").glob(TEMPORARY))
    assert torn  # the kills have hit what they were meant to
    for workdir in (killed, whole):
        assert not attempt(command(workdir), log, lambda since: False)
    assert log.read_text().count("Resuming after step") >= 5
    assert len(metrics(whole)) == steps and metrics(killed) == metrics(whole)
    policy = "policy.safetensors"
    assert (killed / policy).read_bytes() == (whole / policy).read_bytes()
