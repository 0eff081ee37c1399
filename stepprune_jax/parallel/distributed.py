"""Several processes as one program: initialisation and coordination.

A process of a multi-process run sees all devices and owns some. It provides its own rows of each
batch and reads its own slices of the weights; everything else runs identically in each process.
"""

import logging
import os
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import jax
import numpy as np
from jax._src import distributed as jax_distributed
from jax.experimental import multihost_utils

from stepprune_jax.parallel.peers import watch

_LOG = logging.getLogger(__name__)

T = TypeVar("T")

# CPU devices; each takes threads and memory.
_MOST_CORES = 512
_PLAIN = ("JAX_COORDINATOR_ADDRESS", "JAX_NUM_PROCESSES", "JAX_PROCESS_ID")


def use_cores(count: int) -> None:
    """Creates `count` CPU devices before jax starts; 0 leaves their number to jax.

    One device leaves most of a second core idle. If jax sees accelerators, it uses those.

    Args:
        count: `config.cpu_devices`.

    Raises:
        ValueError: not a non-negative integer.
    """
    if not isinstance(count, int) or not 0 <= count <= _MOST_CORES:
        raise ValueError(
            f"config.cpu_devices is {count!r}, expected an integer from 0 to {_MOST_CORES}"
        )
    if count:
        jax.config.update("jax_num_cpu_devices", count)


def start(environment: Mapping[str, str] = os.environ) -> None:
    """Joins this process to the others of its run, if the environment describes several.

    Must be called before jax is asked for devices. See `arguments` for the supported variables.

    Args:
        environment: environment variables.

    Raises:
        ValueError: contradictory variables, or the other processes cannot be reached.
    """
    settings = arguments(environment)
    if settings is None:
        return
    try:
        jax.distributed.initialize(**settings)
    except RuntimeError as error:
        raise ValueError(f"the processes of this run did not find each other: {error}") from error
    # The client has no public name; the checkpoint library uses it as well.
    state = jax_distributed.global_state
    watch(state.client, state.process_id, state.num_processes)


def arguments(environment: Mapping[str, str]) -> dict[str, Any] | None:
    """Returns arguments of `jax.distributed.initialize`, or None for a single process.

    Plain variables JAX_COORDINATOR_ADDRESS (host:port of process 0), JAX_NUM_PROCESSES and
    JAX_PROCESS_ID come first; then a Slurm step of several tasks (one for each GPU, or one for
    each node); then the hosts of a TPU slice; then an indexed Kubernetes job, as GKE runs them.

    Args:
        environment: environment variables.

    Returns:
        The arguments that are not left to jax's own detection.

    Raises:
        ValueError: a variable is missing or is not a number in its range.
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
            # jax gives each task one GPU, which would leave the others of its node idle.
            slurm["local_device_ids"] = range(gpus)
        return slurm
    hosts = environment.get("TPU_PROCESS_ADDRESSES") or environment.get("TPU_WORKER_HOSTNAMES", "")
    if "," in hosts:
        return {}
    if "JOB_COMPLETION_INDEX" in environment and "KUBERNETES_SERVICE_HOST" in environment:
        return {"cluster_detection_method": "k8s"}
    return None


def _plain(environment: Mapping[str, str]) -> dict[str, Any]:
    missing = [name for name in _PLAIN if not environment.get(name)]
    if missing:
        raise ValueError(
            f"{' and '.join(missing)} not set: a run of several processes needs all of "
            f"{', '.join(_PLAIN)}"
        )
    address, *numbers = (environment[name] for name in _PLAIN)
    if not all(number.isdecimal() for number in numbers) or int(numbers[1]) >= int(numbers[0]):
        raise ValueError(
            f"JAX_NUM_PROCESSES is {numbers[0]!r} and JAX_PROCESS_ID {numbers[1]!r}, expected a "
            "count and a number from 0 below it"
        )
    if not address.rpartition(":")[2].isdecimal():
        raise ValueError(f"JAX_COORDINATOR_ADDRESS is {address!r}, expected host:port")
    return {
        "coordinator_address": address,
        "num_processes": int(numbers[0]),
        "process_id": int(numbers[1]),
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
    """Calls a function in the main process and, when it is done there, in the others.

    Meant for functions that write files which the other processes read afterwards.

    Args:
        function: the function.

    Returns:
        Its result in this process.

    Raises:
        ValueError: in the others, if the main process failed, which raises its own error.
    """
    if jax.process_count() == 1:
        return function()
    result, failure = None, None
    if is_main():
        try:
            result = function()
        except Exception as error:  # the others wait below and must be told
            failure = error
    failed = any_process(failure is not None)
    if failure is not None:
        raise failure
    if failed:
        raise ValueError("process 0 of this run failed; its message gives the reason")
    return result if is_main() else function()


def require_same(digest: str, what: str) -> None:
    """Raises if a value differs between processes; all of them must call it.

    Args:
        digest: hash of the value, in hexadecimal.
        what: name of the value, in the plural.

    Raises:
        ValueError: in every process, if the hashes are not equal.
    """
    if jax.process_count() == 1:
        return
    digests = multihost_utils.process_allgather(np.frombuffer(bytes.fromhex(digest), np.uint8))
    if (digests != digests[0]).any():
        raise ValueError(f"{what} differ between the processes of this run")


def any_process(flag: bool) -> bool:
    """Returns whether the flag is set in any process; all of them must call it."""
    if jax.process_count() == 1:
        return flag
    return bool(np.any(multihost_utils.process_allgather(np.array(flag))))
