"""How the processes of a run find each other."""

import functools
import time

import pytest

from stepprune_jax.data.json_files import write_json
from stepprune_jax.parallel import distributed
from stepprune_jax.training import Run
from stepprune_jax.user_input import UserError
from stepprune_jax.workdir import checkpoints

PLAIN = {"JAX_COORDINATOR_ADDRESS": "node1:1234", "JAX_NUM_PROCESSES": "4", "JAX_PROCESS_ID": "3"}
PLAIN_FOUND = {"coordinator_address": "node1:1234", "num_processes": 4, "process_id": 3}
SLURM = {"SLURM_STEP_NUM_TASKS": "2", "SLURM_STEP_NUM_NODES": "2", "SLURM_GPUS_ON_NODE": "8"}
SLURM_FOUND = {"cluster_detection_method": "slurm"}
K8S = {"KUBERNETES_SERVICE_HOST": "10.0.0.1", "JOB_COMPLETION_INDEX": "0"}


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({}, None),
        (PLAIN, PLAIN_FOUND),
        (PLAIN | {"JAX_NUM_PROCESSES": "1"}, None),
        ({**SLURM, "SLURM_STEP_NUM_TASKS": "16"}, SLURM_FOUND),  # a task for each GPU
        (SLURM, SLURM_FOUND | {"local_device_ids": range(8)}),  # a task for each node
        ({**SLURM, "SLURM_STEP_NUM_TASKS": "1"}, None),
        ({"SLURM_NTASKS": "4"}, None),  # an allocation, not a step of it
        (SLURM | PLAIN, PLAIN_FOUND),
        ({"TPU_WORKER_HOSTNAMES": "a,b"}, {}),
        ({"TPU_WORKER_HOSTNAMES": "a"}, None),
        (K8S, {"cluster_detection_method": "k8s"}),
        ({"KUBERNETES_SERVICE_HOST": "10.0.0.1"}, None),  # a notebook's pod
        (K8S | {"JAX_NUM_PROCESSES": "1"}, None),
        ({"WORLD_SIZE": "1"}, None),
        ({"WORLD_SIZE": "2", "JAX_NUM_PROCESSES": "1"}, None),
        ({"WORLD_SIZE": "2"} | PLAIN, PLAIN_FOUND),
    ],
)
def test_the_environment_says_who_is_there(environment, expected):
    assert distributed.arguments(environment) == expected


@pytest.mark.parametrize(
    "change",
    [
        {"JAX_PROCESS_ID": ""},
        {"JAX_COORDINATOR_ADDRESS": "node1"},
        {"JAX_PROCESS_ID": "4"},
    ],
)
def test_variables_that_do_not_fit_are_named(change):
    (given,) = change.items()
    with pytest.raises(ValueError, match="=".join(given)):
        distributed.start(PLAIN | change)


@pytest.mark.parametrize("name", ["WORLD_SIZE", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE"])
def test_other_launchers_are_refused_before_each_process_trains_alone(name):
    with pytest.raises(UserError, match=f"{name} is 2, but .*JAX_NUM_PROCESSES=1 for a process"):
        distributed.start({name: "2"})


@pytest.fixture
def second(monkeypatch):
    """Makes this process the second one, and returns the flags that it sends."""
    told = []
    monkeypatch.setattr(distributed, "is_main", lambda: False)
    monkeypatch.setattr(distributed, "any_process", lambda flag: told.append(flag) or flag)
    return told


def fail():
    raise FileNotFoundError("no file")


def test_a_failure_in_one_process_is_told_to_the_others(second):
    with pytest.raises(FileNotFoundError):
        distributed.main_first(fail)
    assert second == [False, True]
    items = (item() for item in (int, fail))
    with pytest.raises(FileNotFoundError):
        list(distributed.each_together(items))
    assert second[2:] == [False, True]
    assert list(distributed.each_together(iter([None, 2]))) == [None, 2]


def test_a_folder_that_the_processes_do_not_share_is_named(second, tmp_path, monkeypatch):
    def claim():
        return checkpoints.claim(tmp_path, Run(), "model", "data")

    monkeypatch.setattr(checkpoints, "_FILE_TIMEOUT", 1)
    monkeypatch.setattr(time, "sleep", lambda seconds: None)
    with pytest.raises(UserError, match=r"run\.json, which process 0 .*that all processes share"):
        claim()
    about = {"config": Run().flat(), "model": "model", "data": "data"}
    late = functools.partial(write_json, tmp_path / "run.json", about)  # as NFS may show it
    monkeypatch.setattr(time, "sleep", lambda seconds: late())
    monkeypatch.setattr(checkpoints, "_FILE_TIMEOUT", 2)
    assert claim()["model"] == "model"


def test_a_process_alone_is_the_main_one(capsys):
    calls = []
    assert distributed.main_first(lambda: calls.append(1) or len(calls)) == 1
    assert distributed.any_process(True) and not distributed.any_process(False)
    assert distributed.greatest(15) == 15
    distributed.say("once")
    assert capsys.readouterr().out == "once\n"
