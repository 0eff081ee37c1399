"""Accelerators to compile for without having one: devices, and options for their compilers.

XLA's compilers for CUDA and TPU come with jax's plugins and run on any machine.
"""

import importlib.util
import math
import os
import re
from pathlib import Path
from typing import Any, NamedTuple

import jax
from jax.experimental import topologies

from stepprune_jax.parallel.accelerators import known_as
from stepprune_jax.user_input import UserError, nearest

# XLA's message if its first choice of Triton tiles for a product fails. With a device, XLA tries
# other tiles and cuBLAS.
_NO_TILES = "Couldn't find output tile sizes"
_WITHOUT_TRITON = {"xla_gpu_enable_triton_gemm": False}

INSTALL = 'pip install "stepprune-jax[aot]"'


class Target(NamedTuple):
    """Devices of one kind that programs can be compiled for."""

    name: str
    devices: tuple[jax.Device, ...]
    options: dict[str, Any]

    def compile(self, lowered: Any) -> Any:
        """Compiles a lowered program whose arguments lie on `devices`; it cannot be run."""
        try:
            return lowered.compile(compiler_options=self.options)
        except jax.errors.JaxRuntimeError as error:
            if _NO_TILES not in str(error):
                raise
        return lowered.compile(compiler_options=self.options | _WITHOUT_TRITON)


class GpuSpec(NamedTuple):
    """Properties of a CUDA device that XLA needs; threads and shared memory are per core (SM)."""

    name: str
    capability: tuple[int, int]
    cores: int
    fpus: int
    threads: int
    shared: int  # KiB of a core; a block gets one less
    bandwidth: int
    cache: int  # MiB
    clock: float  # GHz
    memory: int  # bytes that the driver reports


# As in NVIDIA's data sheets and, for threads and shared memory, the table of compute capabilities
# of the CUDA programming guide.
CARDS = {
    "h200": GpuSpec(
        "NVIDIA H200", (9, 0), 132, 128, 2048, 228, 4_800_000_000_000, 50, 1.98, 151_397_597_184
    ),
    "a100": GpuSpec(
        "NVIDIA A100-SXM4-80GB",
        (8, 0),
        108,
        64,
        2048,
        164,
        2_039_040_000_000,
        40,
        1.41,
        85_100_068_864,
    ),
    "a6000": GpuSpec(
        "NVIDIA RTX A6000", (8, 6), 84, 128, 1536, 100, 768_096_000_000, 6, 1.8, 51_041_271_808
    ),
}

# Default layout of chips of each generation: the smallest.
TPUS = {"v5e": "1x1", "v5p": "2x2x1", "v6e": "1x1"}


class Named(NamedTuple):
    """Meaning of a target's name: a card or TPU, its number or layout, and its accelerator."""

    kind: str
    size: str
    count: int
    accelerator: str


def read_name(name: str) -> Named:
    """Reads the name of a target: "h200", "a6000:2" cards, or "v5e:2x4" chips."""
    kind, colon, size = name.partition(":")
    kinds = (*CARDS, *TPUS)
    form = r"[1-9]\d*" if kind in CARDS else r"[1-9]\d*(x[1-9]\d*){1,2}"
    if kind not in kinds or (colon and not re.fullmatch(form, size)):
        raise UserError(
            f"target {name!r} is unknown, expected one of {', '.join(kinds)}, with a number of "
            f"cards or a layout of chips, such as h200:2 or v5e:2x4.{nearest(kind, kinds)}"
        )
    if kind in CARDS:
        return Named(kind, size or "1", int(size or 1), str(known_as(CARDS[kind].name)))
    size = size or TPUS[kind]
    return Named(kind, size, math.prod(map(int, size.split("x"))), f"tpu-{kind}")


def make_target(name: str) -> Target:
    """Creates the devices of a target, before or after jax has started."""
    named, problem = read_name(name), missing(name)
    if problem:
        raise UserError(f"target {name!r}: {problem}")
    return (_cuda if named.kind in CARDS else _tpu)(name, named)


def missing(name: str) -> str | None:
    """Returns what a target's compiler lacks on this machine in one line, or None."""
    if read_name(name).kind in CARDS:
        is_installed = _has("jax_cuda12_plugin") and _cuda_toolkit()
        return None if is_installed else f"XLA's CUDA compiler is missing: {INSTALL}"
    return None if _has("libtpu") else f"XLA's TPU compiler is missing: {INSTALL}"


def _has(module: str) -> bool:
    """Returns whether a module is installed."""
    return importlib.util.find_spec(module) is not None


def _cuda_toolkit() -> Path | None:
    """Returns the folder of ptxas and libdevice, in NVIDIA's package or in CUDA_HOME."""
    spec = importlib.util.find_spec("nvidia")
    packages = spec.submodule_search_locations if spec else ()
    packaged = [Path(root) / "cuda_nvcc" for root in packages]
    folders = (*packaged, Path(os.environ.get("CUDA_HOME", "/usr/local/cuda")))
    return next((folder for folder in folders if (folder / "bin" / "ptxas").is_file()), None)


def _cuda(name: str, named: Named) -> Target:
    """Builds a target of cards in one machine."""
    card = CARDS[named.kind]
    major, minor = card.capability
    optin = (card.shared - 1) << 10
    # Limits shared by all of these cards are literal numbers. Without a driver of 12.3 or newer,
    # XLA would leave loops and conditionals out of CUDA graphs.
    text = f"""
      gpu_device_info {{
        threads_per_block_limit: 1024 threads_per_warp: 32 threads_per_core_limit: {card.threads}
        core_count: {card.cores} fpus_per_core: {card.fpus} clock_rate_ghz: {card.clock}
        shared_memory_per_block: 49152 shared_memory_per_core: {card.shared << 10}
        shared_memory_per_block_optin: {optin}
        registers_per_core_limit: 65536 registers_per_block_limit: 65536
        thread_dim_limit_x: 1024 thread_dim_limit_y: 1024 thread_dim_limit_z: 64
        block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
        memory_bandwidth: {card.bandwidth} l2_cache_size: {card.cache << 20}
        device_memory_size: {card.memory}
        cuda_compute_capability {{ major: {major} minor: {minor} }}
        runtime_version: "12.9.0" driver_version: "13.0.0" compile_time_toolkit_version: "12.9.0"
      }}
      runtime_version {{ major: 12 minor: 8 patch: 0 }}
      dnn_version_info {{ major: 9 minor: 10 }}
      platform_name: "CUDA"
      device_description_str: "{card.name}"
    """
    topology = topologies.get_topology_desc(
        platform="cuda",
        topology_name="without a device",
        topology=f"1x1x{named.count}",
        target_config=text,
    )
    toolkit = str(_cuda_toolkit())
    # Autotuning would run candidates on the device.
    options = {"xla_gpu_cuda_data_dir": toolkit, "xla_gpu_autotune_level": 0}
    return Target(name, tuple(topology.devices), options)


def _tpu(name: str, named: Named) -> Target:
    """Builds a target of TPU chips in a layout."""
    import libtpu

    # Otherwise libtpu queries the network for its machine, and admits one process at a time, as if
    # each used the chips.
    os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")
    os.environ.setdefault("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")
    os.environ.setdefault("TPU_LIBRARY_PATH", libtpu.get_library_path())
    sizes = tuple(map(int, named.size.split("x")))
    hosts = {}
    if len(sizes) == 2 and named.count <= 8:  # one machine of v5e or v6e has eight chips
        hosts = {"chips_per_host_bounds": (*sizes, 1)}
    try:
        topology = topologies.get_topology_desc(
            platform="tpu", topology_name=f"{named.kind}:{named.size}", **hosts
        )
    except jax.errors.JaxRuntimeError as error:
        message = str(error).splitlines()[0]
        if not message.startswith("INVALID_ARGUMENT"):
            raise
        raise UserError(
            f"target {name!r}: libtpu has no such layout of chips: {message}"
        ) from error
    return Target(name, tuple(topology.devices), {})
