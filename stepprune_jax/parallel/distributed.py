"""Starts and coordinates the processes of a multi-process run.

Each process controls some of the devices. It provides the rows of each batch for these devices, and
reads the slices of the weights for these devices. All other code runs identically in each process.
"""

import logging
import os
from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeVar

import jax
import numpy as np
from jax.experimental import multihost_utils

from stepprune_jax.user_input import UserError, expect, require

_LOG = logging.getLogger(__name__)

T = TypeVar("T")

# Limit of virtual CPU devices. Each device takes threads and memory.
_MAX_CPU_DEVICES = 512
# Environment variables that define a multi-process run explicitly.
_JAX_VARIABLES = ("JAX_COORDINATOR_ADDRESS", "JAX_NUM_PROCESSES", "JAX_PROCESS_ID")
# Environment variables with the number of processes of torchrun and of implementations of MPI.
_UNSUPPORTED_LAUNCHERS = ("WORLD_SIZE", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE")


def use_cores(count: int) -> None:
    """Sets the number of virtual CPU devices, before jax starts.

    Args:
        count: value of `config.cpu_devices`; 0 leaves the number to jax.
    """
    is_valid = isinstance(count, int) and 0 <= count <= _MAX_CPU_DEVICES
    expect("config.cpu_devices", count, is_valid, f"an integer from 0 to {_MAX_CPU_DEVICES}")
    if count:
        jax.config.update("jax_num_cpu_devices", count)


def start(environment: Mapping[str, str] = os.environ) -> None:
    """Connects the processes of a multi-process run. Does nothing for a single process.

    Must be called before jax initializes its devices. If a process is lost, the remaining processes
    end after jax's heartbeat timeout, with a message that names the index of the lost process.

    Args:
        environment: environment variables, as in `arguments`.

    Raises:
        ValueError: as in `arguments`, or the processes could not connect to each other.
    """
    initialize_arguments = arguments(environment)
    if initialize_arguments is None:
        return
    try:
        jax.distributed.initialize(**initialize_arguments)
    except RuntimeError as error:
        raise UserError(f"the processes of this run did not find each other: {error}") from error


def arguments(environment: Mapping[str, str]) -> dict[str, Any] | None:
    """Returns the arguments of `jax.distributed.initialize` for the launcher of this process.

    The first of these launchers that started the process determines the arguments:

    1. the variables JAX_COORDINATOR_ADDRESS (host:port of process 0), JAX_NUM_PROCESSES and
       JAX_PROCESS_ID;
    2. a Slurm step of several tasks, one for each GPU or one for each node;
    3. the hosts of a TPU slice;
    4. an indexed Kubernetes job, such as on GKE.

    Args:
        environment: environment variables of the process.

    Returns:
        Keyword arguments, or None for a run of a single process. jax detects what the arguments do
        not contain.

    Raises:
        ValueError: the JAX variables contradict each other, or the process was started by torchrun
            or mpirun, which are not supported.
    """
    _, num_processes, process_id = (environment.get(name) for name in _JAX_VARIABLES)
    if num_processes == "1":
        return None
    if num_processes or process_id:
        return _parse_jax_variables(environment)
    if _read_count(environment, "SLURM_STEP_NUM_TASKS") > 1:
        num_gpus = _count_gpus(environment)
        device_ids = {"local_device_ids": range(num_gpus)} if num_gpus else {}
        return {"cluster_detection_method": "slurm", **device_ids}
    hosts = environment.get("TPU_PROCESS_ADDRESSES") or environment.get("TPU_WORKER_HOSTNAMES", "")
    if "," in hosts:
        return {}
    if "JOB_COMPLETION_INDEX" in environment and "KUBERNETES_SERVICE_HOST" in environment:
        return {"cluster_detection_method": "k8s"}
    # Each process of an unsupported launcher would silently become a separate run.
    for name in _UNSUPPORTED_LAUNCHERS:
        if _read_count(environment, name) > 1:
            raise UserError(
                f"{name} is {environment.get(name)}, but torchrun and mpirun are not supported: "
                f"set {', '.join(_JAX_VARIABLES)}, or JAX_NUM_PROCESSES=1 for a single process"
            )
    return None


def _parse_jax_variables(environment: Mapping[str, str]) -> dict[str, Any]:
    """Returns arguments of `jax.distributed.initialize` from the variables `_JAX_VARIABLES`.

    Raises:
        ValueError: a variable is missing or has a bad value.
    """
    address, num_processes, process_id = (environment.get(name, "") for name in _JAX_VARIABLES)
    port = address.rpartition(":")[2]
    are_numbers = all(text.isdecimal() for text in (port, num_processes, process_id))
    if not are_numbers or int(process_id) >= int(num_processes):
        values = ", ".join(f"{name}={environment.get(name, '')}" for name in _JAX_VARIABLES)
        raise UserError(
            "a run of several processes needs JAX_COORDINATOR_ADDRESS=host:port, "
            f"JAX_NUM_PROCESSES, and JAX_PROCESS_ID from 0 below it; got {values}"
        )
    return {
        "coordinator_address": address,
        "num_processes": int(num_processes),
        "process_id": int(process_id),
    }


def _read_count(environment: Mapping[str, str], name: str) -> int:
    """Returns the number in an environment variable, or 0 if it has no number."""
    count = environment.get(name, "").rpartition(":")[2]  # Slurm writes "h100:2" for two H100s
    return int(count) if count.isdecimal() else 0


def _count_gpus(environment: Mapping[str, str]) -> int:
    """Returns the number of GPUs that a task of a Slurm step uses.

    By default, jax gives task i of a node the i-th visible GPU. This default is wrong in two cases.
    If Slurm makes only the GPUs of a task visible to it, the i-th GPU does not exist. If a node has
    a single task, the task would use one GPU of the node and leave its other GPUs idle.

    Args:
        environment: environment variables of the process.

    Returns:
        The number of GPUs, or 0 if the default of jax is right.
    """
    if environment.get("JAX_LOCAL_DEVICE_IDS"):
        return 0
    device_names = environment.get("CUDA_VISIBLE_DEVICES", "").split(",")
    num_visible = sum(bool(name) for name in device_names)
    # Only the GPUs of this task are visible.
    if num_visible and num_visible in (1, _read_count(environment, "SLURM_GPUS_PER_TASK")):
        return num_visible
    num_gpus = num_visible or _read_count(environment, "SLURM_GPUS_ON_NODE")
    num_tasks = _read_count(environment, "SLURM_STEP_NUM_TASKS")
    is_task_per_node = num_tasks == _read_count(environment, "SLURM_STEP_NUM_NODES")
    return num_gpus if is_task_per_node and num_gpus > 1 else 0


def is_main() -> bool:
    """Returns whether this is process 0, which prints and writes files."""
    return jax.process_index() == 0


def say(text: str) -> None:
    """Logs a line in process 0 only."""
    if is_main():
        _LOG.info(text)


def main_first(function: Callable[[], T]) -> T:
    """Calls a function in process 0 first, and then in the remaining processes.

    Meant for functions that write files in process 0 and read them in all processes. If the call
    fails in one process, every process raises an error.

    Returns:
        The function's result in this process.
    """
    main_result: Any = together(lambda: function() if is_main() else None)
    return together(lambda: main_result if is_main() else function())


def together(function: Callable[[], T]) -> T:
    """Calls a function in every process. If one call fails, every process raises an error.

    All processes must call this. An error that is raised in one process only would leave the other
    processes waiting for it forever.

    Returns:
        The function's result in this process.
    """
    result: Any = None
    failure = None
    try:
        result = function()
    except Exception as error:  # raised below, after all processes know about it
        failure = error
    has_failed = any_process(failure is not None)
    if failure is not None:
        raise failure
    require(not has_failed, "another process of this run failed; its message gives the reason")
    return result


def each_together(items: Iterator[T]) -> Iterator[T]:
    """Yields the items of an iterator. If one process fails, every process raises an error.

    All processes must call this, with iterators of the same number of items.
    """
    end_marker: Any = object()
    while (item := together(lambda: next(items, end_marker))) is not end_marker:
        yield item


def require_same(digest: str, what: str) -> None:
    """Raises if a hash differs between processes. All processes must call this.

    Args:
        digest: the hash in hexadecimal.
        what: what was hashed, in the plural, for the message.
    """
    if jax.process_count() == 1:
        return
    digests = multihost_utils.process_allgather(np.frombuffer(bytes.fromhex(digest), np.uint8))
    are_equal = bool((digests == digests[0]).all())
    require(are_equal, f"{what} differ between the processes of this run")


def any_process(flag: bool) -> bool:
    """Returns whether the flag is true in any process. All processes must call this."""
    return bool(greatest(flag))


def greatest(number: int) -> int:
    """Returns the maximum of a number over all processes. All processes must call this."""
    if jax.process_count() == 1:
        return int(number)
    return int(np.max(multihost_utils.process_allgather(np.array(number, np.int32))))
