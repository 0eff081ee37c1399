"""Timing of compiled functions side by side, and the description of a machine."""

import os
import platform
import statistics
import time
from collections.abc import Callable, Mapping

import jax


def machine() -> str:
    """One line that says what the numbers below it were measured on."""
    device, processor = jax.devices()[0], platform.processor() or platform.machine()
    return (
        f"{jax.device_count()} x {device.device_kind} ({device.platform}), {processor}, "
        f"{os.cpu_count()} cores, jax {jax.__version__}, Python {platform.python_version()}"
    )


def time_side_by_side(
    calls: Mapping[str, Callable[..., object]],
    repeats: int,
    setups: Mapping[str, Callable[[], object]] | None = None,
) -> dict[str, float]:
    """Median seconds of each call, taken in turns so that drift of the machine hits all alike.

    Args:
      calls: Functions that return arrays; each is called once before, to compile.
      repeats: Timed rounds.
      setups: By name, what makes the one argument of a call, afresh and untimed each time; calls
        without one take no argument.
    """
    setups = setups or {}

    def run(name, call):
        arguments = [jax.block_until_ready(setups[name]())] if name in setups else []
        start = time.perf_counter()
        jax.block_until_ready(call(*arguments))
        return time.perf_counter() - start

    for name, call in calls.items():
        run(name, call)
    seconds = {name: [] for name in calls}
    for _ in range(repeats):
        for name, call in calls.items():
            seconds[name].append(run(name, call))
    return {name: statistics.median(taken) for name, taken in seconds.items()}


def table(header: list[str], rows: list[list[object]]) -> str:
    """A Markdown table; floats get three significant digits."""
    cells = [[f"{c:.3g}" if isinstance(c, float) else str(c) for c in row] for row in rows]
    lines = [header, ["---"] * len(header), *cells]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)
