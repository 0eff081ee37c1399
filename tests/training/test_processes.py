"""How the processes of a run find each other."""

import pytest

from stepprune_jax.parallel import distributed

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


def test_a_process_alone_is_the_main_one(capsys):
    calls = []
    assert distributed.main_first(lambda: calls.append(1) or len(calls)) == 1
    assert distributed.any_process(True) and not distributed.any_process(False)
    assert distributed.greatest(15) == 15
    distributed.say("once")
    assert capsys.readouterr().out == "once\n"
