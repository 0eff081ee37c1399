"""Compiler options that the backbones need, and the memory of compiled programs."""

from typing import Any, NamedTuple

import jax

# Compiler options for programs with weights, by platform.
#
# CPU: the XLA of jax 0.10 slices bfloat16 through float32 and moves the conversion of the whole
# stack of layers out of their loop unless disabled. It also fetches all matrices of a layer before
# using the first; fetched one by one, they stay in the processor's cache.
#
# GPU: XLA merges products that share an operand, such as queries, keys and values. With cuBLAS this
# first concatenates the matrices, in a copy. It also converts a whole stack of int8 layers, in a
# copy, and not the slices that products read, unless the sinking of slices is disabled.
OPTIONS = {
    "cpu": {
        "xla_disable_hlo_passes": "while-loop-invariant-code-motion",
        "xla_cpu_scheduler_type": "CPU_SCHEDULER_TYPE_MEMORY_OPTIMIZED",
    },
    "gpu": {
        "xla_gpu_dot_merger_threshold_mb": 0,
        "xla_disable_hlo_passes": "slice-sinker",
    },
}

# More of them for programs of an answer. GPU: loops become part of the CUDA graph, so that a
# program is one launch, and the host is not asked at each step whether to go on. A loop that is all
# of a program is fewer commands than XLA would make a graph of.
ANSWERING = {
    "gpu": {
        "xla_gpu_enable_command_buffer": "FUSION,CUBLAS,CUBLASLT,CUDNN,CUSTOM_CALL,CONDITIONAL,"
        "DYNAMIC_SLICE_FUSION,WHILE",  # XLA's own, and the last
        "xla_gpu_graph_min_graph_size": 1,
    },
}


def options_of(platform: str, answers: bool = False) -> dict[str, Any]:
    """Returns the compiler options of a program on a platform."""
    return OPTIONS.get(platform, {}) | (ANSWERING.get(platform, {}) if answers else {})


class Usage(NamedTuple):
    """Bytes on one device while a program runs; outputs are those in memory of their own."""

    arguments: int
    outputs: int
    temporary: int
    total: int


def usage(compiled: jax.stages.Compiled) -> Usage:
    """Returns the memory of a `jax.stages.Compiled` on each device, as planned by the compiler."""
    sizes = compiled.memory_analysis()
    outputs = sizes.output_size_in_bytes - sizes.alias_size_in_bytes
    parts = (sizes.argument_size_in_bytes, outputs, sizes.temp_size_in_bytes)
    return Usage(*parts, sum(parts))
