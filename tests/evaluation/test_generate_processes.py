"""Evaluations in processes of their own: killed and resumed, and several as one."""

import json
import os
import pathlib
import subprocess
import sys
import time

import pytest
from benchmark_folders import write_benchmarks
from processes import free_port, outputs
from small_world import one_width, small_run, tiny_model, write_split

from stepprune_jax.evaluation import generate_stage

SCRIPT = pathlib.Path(__file__).with_name("one_process.py")
SETTINGS = {
    "benchmarks": "folder,pope,mme",
    "methods": "all tokens,grid",
    "budgets": (2,),
    "max_new_tokens": 2,
    "batch_size": 1,
}


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    base = tmp_path_factory.mktemp("processes")
    root = write_benchmarks(base / "eval")
    write_split(root, "test", 3, 0)
    return tiny_model(base / "model").folder, root


@pytest.fixture(scope="module")
def whole(world, tmp_path_factory):
    """What one process answers that nobody stops."""
    return answer_here(world, tmp_path_factory.mktemp("whole"))


def answer_here(world, workdir):
    with pytest.MonkeyPatch.context() as patch:
        one_width(patch)
        config = small_run(*world, data=str(world[1]), **SETTINGS)
        generate_stage.generate_answers(config, workdir)
    return read(workdir)


def read(workdir):
    """The lines of every file without their times."""
    files = sorted((workdir / "answers").rglob("*.jsonl"))
    found = {f"{f.parent.name}/{f.name}": f.read_text().splitlines() for f in files}
    return {name: [json.loads(row) | {"ms": 0} for row in rows] for name, rows in found.items()}


def start(world, workdir, **environment):
    arguments = (*world, workdir, json.dumps(SETTINGS | {"data": str(world[1])}))
    return subprocess.Popen(
        [sys.executable, SCRIPT, *arguments],
        env=os.environ | environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def written(workdir):
    return {path: path.read_bytes() for path in (workdir / "answers").rglob("*.jsonl")}


def kill_after(processes, workdir, lines):
    """Kills processes as soon as they have written so many lines."""
    while sum(content.count(b"\n") for content in written(workdir).values()) < lines:
        assert all(process.poll() is None for process in processes), processes[0].stdout.read()
        time.sleep(0.002)
    for process in processes:
        process.kill()
    for process in processes:
        process.communicate()


def pair(world, workdir):
    """Two processes as one program."""
    about = {"JAX_COORDINATOR_ADDRESS": f"localhost:{free_port()}", "JAX_NUM_PROCESSES": "2"}
    return [start(world, workdir, **about, JAX_PROCESS_ID=str(number)) for number in range(2)]


@pytest.mark.slow
def test_two_processes_answer_what_one_does(world, whole, tmp_path):
    processes = pair(world, tmp_path / "whole")
    printed = outputs(processes)
    assert [process.returncode for process in processes] == [0, 0], "\n".join(printed)
    assert read(tmp_path / "whole") == whole
    # Killed, both have written parts; one process resumes with them.
    killed = tmp_path / "killed"
    kill_after(pair(world, killed), killed, 12)
    before = written(killed)
    assert any(".part-1" in path.name for path in before)
    assert sum(content.count(b"\n") for content in before.values()) < sum(map(len, whole.values()))
    assert answer_here(world, killed) == whole
