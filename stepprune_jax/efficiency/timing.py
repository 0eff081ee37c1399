"""The machine of a measurement, its memory, and tables."""

import os
import platform
import subprocess
from pathlib import Path

import jax

from stepprune_jax.evaluation.cells import markdown_rows


def environment() -> dict[str, str | int]:
    """Returns what affects the speed of programs: device, driver, versions, flags and commit."""
    device = jax.devices()[0]
    driver = Path("/proc/driver/nvidia/version")
    flags = {k: v for k, v in os.environ.items() if k == "XLA_FLAGS" or k.startswith("JAX_")}
    return {
        "device": device.device_kind,
        "platform": device.platform,
        "devices": jax.device_count(),
        "driver": driver.read_text().splitlines()[0] if driver.is_file() else "none",
        "runtime": " ".join(str(device.client.platform_version).split()),
        "processor": _processor(),
        "cores": os.cpu_count() or 1,
        "jax": jax.__version__,
        "python": platform.python_version(),
        "matmul_precision": str(jax.config.jax_default_matmul_precision),
        "flags": " ".join(f"{name}={value}" for name, value in sorted(flags.items())) or "none",
        "commit": _commit(),
    }


def _processor() -> str:
    """Returns the processor's name, if the system reports it."""
    lines = Path("/proc/cpuinfo")
    named = lines.read_text().splitlines() if lines.is_file() else []
    names = (line.partition(":")[2].strip() for line in named if line.startswith("model name"))
    return next(names, platform.processor() or platform.machine())


def _commit() -> str:
    """Returns the commit, with "-dirty" for modified files; "unknown" outside a checkout."""
    command = ("git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty")
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def peak_memory() -> int | None:
    """Returns the largest peak bytes of this process's devices; None if unreported."""
    stats = [device.memory_stats() for device in jax.local_devices()]
    return max(device["peak_bytes_in_use"] for device in stats) if all(stats) else None


def table(header: list[str], rows: list[list[object]]) -> str:
    """Formats a Markdown table; floats get three significant digits."""
    cells = [[f"{c:.3g}" if isinstance(c, float) else str(c) for c in row] for row in rows]
    return markdown_rows(header, cells, texts=1).rstrip()
