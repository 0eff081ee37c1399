"""Several processes as one program: initialisation and coordination.

A process of a multi-process run sees all devices and owns some of them. The process provides the
rows of each batch for its devices, and reads the slices of the weights for its devices. Everything
else runs identically in each process.
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
_PLAIN = ("JAX_COORDINATOR_ADDRESS", "JAX_NUM_PROCESSES", "JAX_PROCESS_ID")
# The number of processes, as torchrun and implementations of MPI set it.
_FOREIGN = ("WORLD_SIZE", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE")


def use_cores(count: int) -> None:
    """Creates `config.cpu_devices` CPU devices before jax starts; 0 leaves their number to jax."""
    is_valid = isinstance(count, int) and 0 <= count <= _MAX_CPU_DEVICES
    expect("config.cpu_devices", count, is_valid, f"an integer from 0 to {_MAX_CPU_DEVICES}")
    if count:
        jax.config.update("jax_num_cpu_devices", count)


def start(environment: Mapping[str, str] = os.environ) -> None:
    """Connects this process to the other processes of its run, if the environment has several.

    Must be called before jax is asked for devices. If a process is lost, the remaining processes
    end after jax's heartbeat timeout, with a message that has the number of the lost process.
    """
    settings = arguments(environment)
    if settings is None:
        return
    try:
        jax.distributed.initialize(**settings)
    except RuntimeError as error:
        raise UserError(f"the processes of this run did not find each other: {error}") from error


def arguments(environment: Mapping[str, str]) -> dict[str, Any] | None:
    """Returns arguments of `jax.distributed.initialize`, or None for a single process.

    Plain variables JAX_COORDINATOR_ADDRESS (host:port of process 0), JAX_NUM_PROCESSES and
    JAX_PROCESS_ID come first; then a Slurm step of several tasks (one for each GPU, or one for
    each node); then the hosts of a TPU slice; then an indexed Kubernetes job, as GKE runs them.

    Raises:
        ValueError: plain variables that do not fit, or the variables of torchrun or mpirun.
    """
    plain = [environment.get(name) for name in _PLAIN]
    if plain[1] == "1":
        return None
    if any(plain[1:]):
        return _plain(environment)
    tasks = _count(environment, "SLURM_STEP_NUM_TASKS")
    if tasks > 1:
        slurm: dict[str, Any] = {"cluster_detection_method": "slurm"}
        gpus = _count(environment, "SLURM_GPUS_ON_NODE")
        if tasks == _count(environment, "SLURM_STEP_NUM_NODES") and gpus > 1:
            # jax gives each task one GPU, and the other GPUs of the node would be idle.
            slurm["local_device_ids"] = range(gpus)
        return slurm
    hosts = environment.get("TPU_PROCESS_ADDRESSES") or environment.get("TPU_WORKER_HOSTNAMES", "")
    if "," in hosts:
        return {}
    if "JOB_COMPLETION_INDEX" in environment and "KUBERNETES_SERVICE_HOST" in environment:
        return {"cluster_detection_method": "k8s"}
    for name in _FOREIGN:  # otherwise each process would be a separate run
        require(
            _count(environment, name) < 2,
            f"{name} is {environment.get(name)}, but torchrun and mpirun are not supported: set "
            f"{', '.join(_PLAIN)}, or {_PLAIN[1]}=1 for a process alone",
        )
    return None


def _plain(environment: Mapping[str, str]) -> dict[str, Any]:
    address, count, number = (environment.get(name, "") for name in _PLAIN)
    is_valid = address.rpartition(":")[2].isdecimal() and count.isdecimal() and number.isdecimal()
    if not is_valid or int(number) >= int(count):
        values = ", ".join(f"{name}={environment.get(name, '')}" for name in _PLAIN)
        raise UserError(
            f"a run of several processes needs {_PLAIN[0]}=host:port, {_PLAIN[1]}, and {_PLAIN[2]} "
            f"from 0 below it; got {values}"
        )
    return {
        "coordinator_address": address,
        "num_processes": int(count),
        "process_id": int(number),
    }


def _count(environment: Mapping[str, str], name: str) -> int:
    text = environment.get(name, "")
    return int(text) if text.isdecimal() else 0


def is_main() -> bool:
    """Returns whether this process is the one that prints and writes files."""
    return jax.process_index() == 0


def say(text: str) -> None:
    """Reports progress, once for all processes."""
    if is_main():
        _LOG.info(text)


def main_first(function: Callable[[], T]) -> T:
    """Calls a function in the main process first, and then in the remaining processes.

    Meant for functions that write files in the main process and read them in all processes. If one
    process fails, every process raises an error.
    """
    result = together(lambda: function() if is_main() else None)
    return together(lambda: result if is_main() else function())


def together(function: Callable[[], T]) -> T:
    """Calls a function in every process; if one process fails, every process raises an error."""
    result, failure = None, None
    try:
        result = function()
    except Exception as error:  # the other processes wait below
        failure = error
    failed = any_process(failure is not None)
    if failure is not None:
        raise failure
    require(not failed, "another process of this run failed; its message gives the reason")
    return result


def each_together(items: Iterator[T]) -> Iterator[T]:
    """Yields the items that each process reads; if one process fails to read, all raise."""
    end = object()
    while (item := together(lambda: next(items, end))) is not end:
        yield item


def require_same(digest: str, what: str) -> None:
    """Raises if a hash in hexadecimal differs between processes; all of them must call it."""
    if jax.process_count() == 1:
        return
    digests = multihost_utils.process_allgather(np.frombuffer(bytes.fromhex(digest), np.uint8))
    same = bool((digests == digests[0]).all())
    require(same, f"{what} differ between the processes of this run")


def any_process(flag: bool) -> bool:
    """Returns whether the flag is set in any process; all of them must call it."""
    return bool(greatest(flag))


def greatest(number: int) -> int:
    """Returns the greatest number of all processes; all of them must call it."""
    if jax.process_count() == 1:
        return int(number)
    return int(np.max(multihost_utils.process_allgather(np.array(number, np.int32))))
