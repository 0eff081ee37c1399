"""Runs that are killed, at random moments and in the middle of saving, lose nothing."""

import pathlib
import subprocess
import sys

import pytest
from tiny_run import metrics, write_data

from stepprune_jax import testing

SCRIPT = pathlib.Path(__file__).with_name("kills.py")


@pytest.mark.slow
@pytest.mark.parametrize(("steps", "kills"), [(14, 2), (300, 20)])
def test_a_killed_run_learns_what_an_uninterrupted_one_does(tmp_path, steps, kills):
    testing.tiny_llava(tmp_path / "model")
    write_data(tmp_path / "data")
    command = [sys.executable, SCRIPT, tmp_path, str(steps), str(kills), "0"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    told = done.stdout.splitlines()
    print(done.stdout)
    assert len(told) == kills and "killed while saving, 1 torn" in told[0]
    assert all("killed" in line for line in told)
    assert (tmp_path / "killed.log").read_text().count("Resuming after step") >= kills / 2
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    assert len(metrics(whole)) == steps and metrics(killed) == metrics(whole)
    policy = "policy.safetensors"
    assert (killed / policy).read_bytes() == (whole / policy).read_bytes()
