"""Times functions in alternation."""

import os
import platform
import statistics
import time
from collections.abc import Callable, Mapping

import jax


def machine() -> str:
    """Returns a line that describes the machine."""
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
    """Returns the median seconds of each call.

    The calls alternate, so that drift of the machine affects all of them equally.

    Args:
        calls: functions by name.
        repeats: number of timed calls of each function, after one call that is not timed.
        setups: functions by name that return the argument of a call; not timed.
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
    return {name: statistics.median(durations) for name, durations in seconds.items()}
