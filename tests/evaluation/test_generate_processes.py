"""Evaluations in separate processes: several processes share a run, and a killed run resumes."""

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
def expected(world, tmp_path_factory):
    """Returns the answers of a single process that is not interrupted."""
    return answer_here(world, tmp_path_factory.mktemp("expected"))


def answer_here(world, workdir):
    """Runs the evaluation in this process and returns its answers."""
    with pytest.MonkeyPatch.context() as patch:
        one_width(patch)
        config = small_run(*world, data=str(world[1]), **SETTINGS)
        generate_stage.generate_answers(config, workdir)
    return read(workdir)


def read(workdir):
    """Returns the lines of every answer file, with times of 0."""
    files = sorted((workdir / "answers").rglob("*.jsonl"))
    lines = {f"{f.parent.name}/{f.name}": f.read_text().splitlines() for f in files}
    return {name: [json.loads(row) | {"ms": 0} for row in rows] for name, rows in lines.items()}


def start(world, workdir, **environment):
    arguments = (*world, workdir, json.dumps(SETTINGS | {"data": str(world[1])}))
    return subprocess.Popen(
        [sys.executable, SCRIPT, *arguments],
        env=os.environ | environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def read_bytes(workdir):
    """Returns the contents of every answer file."""
    return {path: path.read_bytes() for path in (workdir / "answers").rglob("*.jsonl")}


def kill_after(processes, workdir, num_lines):
    """Kills processes as soon as they have written `num_lines` lines."""
    while sum(content.count(b"\n") for content in read_bytes(workdir).values()) < num_lines:
        assert all(process.poll() is None for process in processes), processes[0].stdout.read()
        time.sleep(0.002)
    for process in processes:
        process.kill()
    for process in processes:
        process.communicate()


def pair(world, workdir):
    """Starts two processes of one run."""
    variables = {"JAX_COORDINATOR_ADDRESS": f"localhost:{free_port()}", "JAX_NUM_PROCESSES": "2"}
    return [start(world, workdir, **variables, JAX_PROCESS_ID=str(number)) for number in range(2)]


@pytest.mark.slow
def test_two_processes_give_the_answers_of_one_and_resume_after_a_kill(world, expected, tmp_path):
    processes = pair(world, tmp_path / "finished")
    printed = outputs(processes)
    assert [process.returncode for process in processes] == [0, 0], "\n".join(printed)
    assert read(tmp_path / "finished") == expected
    # Two killed processes leave parts of files, and a single process resumes with them.
    killed = tmp_path / "killed"
    kill_after(pair(world, killed), killed, 12)
    parts = read_bytes(killed)
    assert any(".part-1" in path.name for path in parts)
    num_lines = sum(content.count(b"\n") for content in parts.values())
    assert num_lines < sum(map(len, expected.values()))
    assert answer_here(world, killed) == expected
