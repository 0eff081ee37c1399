"""Describes the machine of a measurement and formats tables of results."""

import os
import platform
import subprocess
from pathlib import Path

import jax

from stepprune_jax.evaluation.cells import markdown_rows

_PRECISION_FLAG = "jax_default_matmul_precision"  # `jax.config` declares no such attribute.


def environment() -> dict[str, str | int]:
    """Describes the machine and the software of a measurement.

    Returns:
        Device, driver, processor, versions, flags of jax and XLA, and the commit of this package.
    """
    device = jax.devices()[0]
    driver_file = Path("/proc/driver/nvidia/version")
    jax_flags = {
        name: value
        for name, value in os.environ.items()
        if name == "XLA_FLAGS" or name.startswith("JAX_")
    }
    return {
        "device": device.device_kind,
        "platform": device.platform,
        "devices": jax.device_count(),
        "driver": driver_file.read_text().splitlines()[0] if driver_file.is_file() else "none",
        "runtime": " ".join(str(device.client.platform_version).split()),
        "processor": _processor(),
        "cores": os.cpu_count() or 1,
        "jax": jax.__version__,
        "python": platform.python_version(),
        "matmul_precision": str(getattr(jax.config, _PRECISION_FLAG)),
        "flags": " ".join(f"{name}={value}" for name, value in sorted(jax_flags.items())) or "none",
        "commit": _commit(),
    }


def _processor() -> str:
    """Returns the processor's model name, or its architecture if the system reports no name."""
    cpu_info = Path("/proc/cpuinfo")
    lines = cpu_info.read_text().splitlines() if cpu_info.is_file() else []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.processor() or platform.machine())


def _commit() -> str:
    """Returns the commit of this package's git checkout, or "unknown" outside a checkout.

    The commit ends in "-dirty" if files are modified.
    """
    command = ("git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty")
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def peak_memory() -> int | None:
    """Returns the largest peak memory of all local devices, in bytes; None if it is unknown."""
    device_stats = [device.memory_stats() for device in jax.local_devices()]
    if not all(device_stats):  # CPUs have no statistics.
        return None
    return max(stats["peak_bytes_in_use"] for stats in device_stats)


def table(header: list[str], rows: list[list[object]]) -> str:
    """Formats a Markdown table. Floats have three significant digits.

    Args:
        header: titles of the columns.
        rows: cells of each row. The first cell is text, and all other cells are numbers.
    """
    cells = [
        [f"{cell:.3g}" if isinstance(cell, float) else str(cell) for cell in row] for row in rows
    ]
    return markdown_rows(header, cells, num_text_columns=1).rstrip()
