"""Creates targets for ahead-of-time compilation: accelerators that this machine does not have.

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

from stepprune_jax.extras import install_command
from stepprune_jax.parallel.accelerators import known_as
from stepprune_jax.user_input import UserError, nearest

# XLA's message if its first Triton tiling of a matrix product fails. With a device, XLA would then
# try other tilings and cuBLAS. Without a device, the program is compiled again without Triton.
_NO_TILES = "Couldn't find output tile sizes"
_WITHOUT_TRITON = {"xla_gpu_enable_triton_gemm": False}


class Target(NamedTuple):
    """Devices of one kind that programs can be compiled for. Created by `make_target`.

    Attributes:
        name: name of the target, such as "h200:2".
        devices: descriptions of the devices. Arrays cannot be placed on them.
        options: compiler options for these devices.
    """

    name: str
    devices: tuple[Any, ...]
    options: dict[str, Any]

    def compile(self, lowered: Any) -> Any:
        """Compiles a lowered program whose arguments are on `devices`.

        Args:
            lowered: a `jax.stages.Lowered`.

        Returns:
            A `jax.stages.Compiled`, whose memory and cost can be read. It cannot be run.
        """
        try:
            return lowered.compile(compiler_options=self.options)
        except jax.errors.JaxRuntimeError as error:
            if _NO_TILES not in str(error):
                raise
        return lowered.compile(compiler_options=self.options | _WITHOUT_TRITON)


class GpuSpec(NamedTuple):
    """Properties of a CUDA device that XLA's compiler needs. A core is a streaming multiprocessor.

    Attributes:
        name: name that the driver reports.
        capability: major and minor compute capability.
        cores: number of cores.
        fpus: number of floating-point units of a core.
        threads: maximum number of resident threads of a core.
        shared: shared memory of a core in KiB. A block can use 1 KiB less.
        bandwidth: memory bandwidth in bytes per second.
        cache: L2 cache in MiB.
        clock: clock rate in GHz.
        memory: memory in bytes, as the driver reports it.
    """

    name: str
    capability: tuple[int, int]
    cores: int
    fpus: int
    threads: int
    shared: int
    bandwidth: int
    cache: int
    clock: float
    memory: int


# From NVIDIA's data sheets. Threads and shared memory are from the table of compute capabilities in
# the CUDA programming guide.
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

# Default layout of the chips of each TPU generation: the smallest one.
TPUS = {"v5e": "1x1", "v5p": "2x2x1", "v6e": "1x1"}


class TargetName(NamedTuple):
    """Parsed name of a target, as `read_name` returns it.

    Attributes:
        kind: key of `CARDS` or `TPUS`.
        size: number of cards as text, or layout of TPU chips such as "2x4".
        count: number of cards or chips.
        accelerator: key of `accelerators.ACCELERATORS`.
    """

    kind: str
    size: str
    count: int
    accelerator: str


def read_name(name: str) -> TargetName:
    """Parses the name of a target.

    Args:
        name: a card ("h200"), several cards ("a6000:2"), TPU chips in a layout ("v5e:2x4"), or TPU
            chips in the default layout ("v5e").

    Raises:
        ValueError: the name is unknown.
    """
    kind, separator, size = name.partition(":")
    kinds = (*CARDS, *TPUS)
    size_pattern = r"[1-9]\d*" if kind in CARDS else r"[1-9]\d*(x[1-9]\d*){1,2}"
    if kind not in kinds or (separator and not re.fullmatch(size_pattern, size)):
        raise UserError(
            f"target {name!r} is unknown, expected one of {', '.join(kinds)}, with a number of "
            f"cards or a layout of chips, such as h200:2 or v5e:2x4.{nearest(kind, kinds)}"
        )
    if kind in CARDS:
        size = size or "1"
        return TargetName(kind, size, int(size), str(known_as(CARDS[kind].name)))
    size = size or TPUS[kind]
    num_chips = math.prod(map(int, size.split("x")))
    return TargetName(kind, size, num_chips, f"tpu-{kind}")


def make_target(name: str) -> Target:
    """Creates a target. May be called before or after jax has initialized its devices.

    Args:
        name: as in `read_name`.

    Raises:
        ValueError: the name is unknown, or the compiler is not installed.
    """
    target_name, problem = read_name(name), missing(name)
    if problem:
        raise UserError(f"target {name!r}: {problem}")
    make = _make_cuda_target if target_name.kind in CARDS else _make_tpu_target
    return make(name, target_name)


def missing(name: str) -> str | None:
    """Checks that the compiler of a target is installed.

    Args:
        name: as in `read_name`.

    Returns:
        None if the compiler is installed, otherwise a message that says how to install it.
    """
    if read_name(name).kind in CARDS:
        is_installed = _has("jax_cuda12_plugin") and _cuda_toolkit()
        compiler = "CUDA"
    else:
        is_installed, compiler = _has("libtpu"), "TPU"
    problem = f"XLA's {compiler} compiler is missing: {install_command('aot')}"
    return None if is_installed else problem


def _has(module: str) -> bool:
    """Returns whether a module is installed."""
    return importlib.util.find_spec(module) is not None


def _cuda_toolkit() -> Path | None:
    """Returns the folder of ptxas and libdevice, in NVIDIA's package or in CUDA_HOME."""
    spec = importlib.util.find_spec("nvidia")
    package_folders = spec.submodule_search_locations if spec else None
    folders = [Path(folder) / "cuda_nvcc" for folder in package_folders or ()]
    folders.append(Path(os.environ.get("CUDA_HOME", "/usr/local/cuda")))
    return next((folder for folder in folders if (folder / "bin" / "ptxas").is_file()), None)


def _make_cuda_target(name: str, target_name: TargetName) -> Target:
    """Creates a target of CUDA cards in one machine.

    Args:
        name: name of the target, as the user gave it.
        target_name: the parsed name.
    """
    card = CARDS[target_name.kind]
    major, minor = card.capability
    core_memory, block_memory = card.shared << 10, (card.shared - 1) << 10  # KiB to bytes
    # A protocol buffer of XLA in text form. Literal numbers in it are equal for all cards in
    # `CARDS`. For a driver older than 12.3, XLA would exclude loops and conditionals from CUDA
    # graphs.
    description = f"""
      gpu_device_info {{
        threads_per_block_limit: 1024 threads_per_warp: 32 threads_per_core_limit: {card.threads}
        core_count: {card.cores} fpus_per_core: {card.fpus} clock_rate_ghz: {card.clock}
        shared_memory_per_block: 49152 shared_memory_per_core: {core_memory}
        shared_memory_per_block_optin: {block_memory}
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
        topology=f"1x1x{target_name.count}",
        target_config=description,
    )
    toolkit = str(_cuda_toolkit())
    # Autotuning is off because it would run kernels on the device.
    options = {"xla_gpu_cuda_data_dir": toolkit, "xla_gpu_autotune_level": 0}
    return Target(name, tuple(topology.devices), options)


def _make_tpu_target(name: str, target_name: TargetName) -> Target:
    """Creates a target of TPU chips in a layout.

    Args:
        name: name of the target, as the user gave it.
        target_name: the parsed name.

    Raises:
        ValueError: this TPU generation has no such layout.
    """
    import libtpu  # pyright: ignore[reportMissingImports]  # an optional package

    # Without these variables, libtpu queries the network for its machine, and allows one process at
    # a time, as if the process used the chips.
    os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")
    os.environ.setdefault("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")
    os.environ.setdefault("TPU_LIBRARY_PATH", libtpu.get_library_path())
    layout = tuple(map(int, target_name.size.split("x")))  # number of chips along each axis
    options = {}
    if len(layout) == 2 and target_name.count <= 8:  # one machine of v5e or v6e has eight chips
        options = {"chips_per_host_bounds": (*layout, 1)}
    try:
        topology = topologies.get_topology_desc(
            platform="tpu", topology_name=f"{target_name.kind}:{target_name.size}", **options
        )
    except jax.errors.JaxRuntimeError as error:
        message = str(error).splitlines()[0]
        if not message.startswith("INVALID_ARGUMENT"):
            raise
        raise UserError(
            f"target {name!r}: libtpu has no such layout of chips: {message}"
        ) from error
    return Target(name, tuple(topology.devices), {})
