"""What to change when a run does not fit into the memory of its devices."""

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import jax

from stepprune_jax.generate.placement import row_count
from stepprune_jax.sharding import build_mesh
from stepprune_jax.user_input import user_input


@contextlib.contextmanager
def advice(config: Any, devices: Sequence[Any] | None = None) -> Iterator[None]:
    """Turns the compiler's and the allocator's report of too little memory into one line.

    Args:
        config: the run's checked `ConfigDict`.
        devices: that it runs on; by default all that jax sees.

    Raises:
        ValueError: memory was not enough; the message says what to change.
    """
    try:
        yield
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        said, change = str(error).strip().splitlines()[0], "; ".join(remedies(config, devices))
        with user_input():
            raise ValueError(
                f"the devices' memory is not enough: {change}. jax says: {said}"
            ) from error


def remedies(config: Any, devices: Sequence[Any] | None = None) -> list[str]:
    """What needs less memory, the least painful first, as far as it is left to do.

    Args:
        config: the run's checked `ConfigDict`.
        devices: that it runs on; by default all that jax sees.
    """
    count = len(jax.devices() if devices is None else devices)
    spread = 1 if config.mesh == "single" else row_count(build_mesh(config.mesh, devices))
    each, rows = config.batch_size // spread, config.model.rows_at_once
    found = []
    if rows != 1 and each > 1:
        now = f"{rows} rows" if rows else f"all {each} rows of a device"
        found.append(f"lower config.model.rows_at_once (the frozen model runs {now} at a time)")
    if not config.model.remat:
        found.append("set config.model.remat=True (recomputes blocks instead of keeping them)")
    if config.model.dtype == "float32":
        found.append("set config.model.dtype=bfloat16")
    if count > 1 and config.mesh in ("single", "data"):
        found.append(f"set config.mesh=fsdp (cuts the weights over {count} devices)")
    if each > 1:
        found.append(f"lower config.batch_size ({config.batch_size}; this changes what is learned)")
    return found or ["use more devices, or larger ones"]
