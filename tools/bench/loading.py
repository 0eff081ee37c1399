"""Times the loading of a random checkpoint whose matrices have the sizes of LLaVA-1.5-7B."""

import os
import tempfile
import time
from pathlib import Path

import jax
import jax.numpy as jnp

from stepprune_jax import testing
from stepprune_jax.checkpoints.load import load_vlm
from stepprune_jax.checkpoints.safetensors import SINGLE_NAME
from stepprune_jax.efficiency.timing import table

WIDE = {
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "num_attention_heads": 32,
    "num_key_value_heads": 32,
}
LAYER_BYTES = 2 * (4 * 4096**2 + 3 * 4096 * 11008)


def drop_from_cache(files: list[Path]) -> bool:
    """Drops files from the system's cache. Returns False on systems that cannot do this."""
    if not hasattr(os, "posix_fadvise"):
        return False
    for file in files:
        with open(file, "rb+") as handle:
            os.fsync(handle.fileno())
            os.posix_fadvise(handle.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    return True


def read_all(files: list[Path]) -> None:
    """Reads files completely and discards the bytes."""
    buffer = bytearray(16 << 20)
    for file in files:
        with open(file, "rb", buffering=0) as handle:
            while handle.readinto(buffer):
                pass


def report(gigabytes: float, repeats: int) -> str:
    """Writes a bfloat16 checkpoint, times its loading, and returns a table with GB/s."""
    layers = max(1, round(1e9 * gigabytes / LAYER_BYTES))
    with tempfile.TemporaryDirectory() as folder:
        text = {**WIDE, "num_hidden_layers": layers}
        testing.tiny_llava(folder, text=text, dtype=jnp.bfloat16)
        files = [Path(folder) / SINGLE_NAME]
        size = sum(file.stat().st_size for file in files) / 1e9
        calls = {
            "load_vlm": lambda: jax.block_until_ready(load_vlm(folder, progress=False).params),
            "plain reading": lambda: read_all(files),
        }
        sources = ["disk", "cache"] if drop_from_cache(files) else ["cache"]
        seconds = {(name, source): [] for source in sources for name in calls}
        for _ in range(repeats):
            for name, source in seconds:
                if source == "disk":
                    drop_from_cache(files)
                start = time.perf_counter()
                calls[name]()
                seconds[name, source].append(time.perf_counter() - start)
    rows = [
        [name, source, min(durations), size / min(durations)]
        for (name, source), durations in seconds.items()
    ]
    return table([f"loading {size:.2f} GB", "from", "s", "GB/s"], rows)
