"""Processes of a run find each other and fail together."""

import functools
import time

import pytest

from stepprune_jax.data.json_files import write_json
from stepprune_jax.parallel import distributed
from stepprune_jax.training import Run
from stepprune_jax.user_input import UserError
from stepprune_jax.workdir import checkpoints

JAX = {"JAX_COORDINATOR_ADDRESS": "node1:1234", "JAX_NUM_PROCESSES": "4", "JAX_PROCESS_ID": "3"}
JAX_ARGUMENTS = {"coordinator_address": "node1:1234", "num_processes": 4, "process_id": 3}
SLURM = {"SLURM_STEP_NUM_TASKS": "2", "SLURM_STEP_NUM_NODES": "2", "SLURM_GPUS_ON_NODE": "8"}
SLURM_ARGUMENTS = {"cluster_detection_method": "slurm"}
# Four tasks on each of two nodes. Each task sees only its GPUs.
BOUND = {"SLURM_STEP_NUM_TASKS": "8", "SLURM_STEP_NUM_NODES": "2", "SLURM_GPUS_ON_NODE": "8"}
K8S = {"KUBERNETES_SERVICE_HOST": "10.0.0.1", "JOB_COMPLETION_INDEX": "0"}


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({}, None),
        (JAX, JAX_ARGUMENTS),
        (JAX | {"JAX_NUM_PROCESSES": "1"}, None),
        ({**SLURM, "SLURM_STEP_NUM_TASKS": "16"}, SLURM_ARGUMENTS),  # a task for each GPU
        (SLURM, SLURM_ARGUMENTS | {"local_device_ids": range(8)}),  # a task for each node
        (
            SLURM | {"CUDA_VISIBLE_DEVICES": "4,5,6"},
            SLURM_ARGUMENTS | {"local_device_ids": range(3)},
        ),
        (SLURM | {"JAX_LOCAL_DEVICE_IDS": "0,2"}, SLURM_ARGUMENTS),
        (BOUND | {"CUDA_VISIBLE_DEVICES": "0"}, SLURM_ARGUMENTS | {"local_device_ids": range(1)}),
        (
            BOUND | {"CUDA_VISIBLE_DEVICES": "0,1", "SLURM_GPUS_PER_TASK": "h100:2"},
            SLURM_ARGUMENTS | {"local_device_ids": range(2)},
        ),
        (BOUND | {"CUDA_VISIBLE_DEVICES": "0,1,2,3"}, SLURM_ARGUMENTS),  # all tasks see all GPUs
        ({**SLURM, "SLURM_STEP_NUM_TASKS": "1"}, None),
        ({"SLURM_NTASKS": "4"}, None),  # an allocation, not a step of it
        (SLURM | JAX, JAX_ARGUMENTS),
        ({"TPU_WORKER_HOSTNAMES": "a,b"}, {}),
        ({"TPU_WORKER_HOSTNAMES": "a"}, None),
        (K8S, {"cluster_detection_method": "k8s"}),
        ({"KUBERNETES_SERVICE_HOST": "10.0.0.1"}, None),  # a notebook's pod
        (K8S | {"JAX_NUM_PROCESSES": "1"}, None),
        ({"WORLD_SIZE": "1"}, None),
        ({"WORLD_SIZE": "2", "JAX_NUM_PROCESSES": "1"}, None),
        ({"WORLD_SIZE": "2"} | JAX, JAX_ARGUMENTS),
    ],
)
def test_the_environment_describes_the_processes(environment, expected):
    assert distributed.arguments(environment) == expected


@pytest.mark.parametrize(
    "change",
    [{"JAX_PROCESS_ID": ""}, {"JAX_COORDINATOR_ADDRESS": "node1"}, {"JAX_PROCESS_ID": "4"}],
)
def test_a_bad_variable_is_named(change):
    (variable,) = change.items()
    with pytest.raises(ValueError, match="=".join(variable)):
        distributed.start(JAX | change)


@pytest.mark.parametrize("name", ["WORLD_SIZE", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE"])
def test_other_launchers_are_refused(name):
    """Otherwise each process would train a separate run."""
    with pytest.raises(UserError, match=f"{name} is 2, but .*JAX_NUM_PROCESSES=1 for a single"):
        distributed.start({name: "2"})


@pytest.fixture
def sent_flags(monkeypatch):
    """Makes this process the second one; returns the flags that it sends."""
    flags = []
    monkeypatch.setattr(distributed, "is_main", lambda: False)
    monkeypatch.setattr(distributed, "any_process", lambda flag: flags.append(flag) or flag)
    return flags


def fail():
    raise FileNotFoundError("no file")


def test_a_failure_in_one_process_is_sent_to_all(sent_flags):
    with pytest.raises(FileNotFoundError):
        distributed.main_first(fail)
    assert sent_flags == [False, True]
    items = (read() for read in (int, fail))
    with pytest.raises(FileNotFoundError):
        list(distributed.each_together(items))
    assert sent_flags[2:] == [False, True]
    assert list(distributed.each_together(iter([None, 2]))) == [None, 2]


def test_a_folder_that_the_processes_do_not_share_is_named(sent_flags, tmp_path, monkeypatch):
    def claim():
        return checkpoints.claim(tmp_path, Run(), "model", "data")

    monkeypatch.setattr(checkpoints, "_FILE_TIMEOUT", 1)
    monkeypatch.setattr(time, "sleep", lambda seconds: None)
    with pytest.raises(UserError, match=r"run\.json, which process 0 .*that all processes share"):
        claim()
    about = {"config": Run().flat(), "model": "model", "data": "data"}
    # NFS may show the file of another process late.
    write_late = functools.partial(write_json, tmp_path / "run.json", about)
    monkeypatch.setattr(time, "sleep", lambda seconds: write_late())
    monkeypatch.setattr(checkpoints, "_FILE_TIMEOUT", 2)
    assert claim()["model"] == "model"


def test_a_single_process_is_the_main_process(capsys):
    calls = []
    assert distributed.main_first(lambda: calls.append(1) or len(calls)) == 1
    assert distributed.any_process(True) and not distributed.any_process(False)
    assert distributed.greatest(15) == 15
    distributed.say("once")
    assert capsys.readouterr().out == "once\n"
