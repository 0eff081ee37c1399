"""Compiler options that the backbones need, and the memory of compiled programs."""

from typing import Any, NamedTuple

import jax

# Compiler options for programs with weights, by platform.
#
# CPU: the XLA of jax 0.10 slices bfloat16 through float32 and converts the stack of
# all layers before their loop, unless this pass is disabled. XLA also fetches all matrices of a
# layer before it uses the first one. Fetched one by one, matrices stay in the processor's cache.
#
# GPU: XLA merges products that share an operand, such as queries, keys and values. With cuBLAS this
# first copies the matrices into one. XLA also converts a copy of all stacked int8 layers instead
# of the slices that products read, unless the sinking of slices is disabled.
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

# Further options for programs that generate answers.
#
# GPU: loops become part of the CUDA graph. A program is then one launch, and the host does not
# decide at each step whether the loop continues. A program that is a single loop has fewer commands
# than XLA's minimum for a graph, so the minimum is set to 1.
ANSWERING = {
    "gpu": {
        "xla_gpu_enable_command_buffer": "FUSION,CUBLAS,CUBLASLT,CUDNN,CUSTOM_CALL,CONDITIONAL,"
        "DYNAMIC_SLICE_FUSION,WHILE",  # XLA's defaults, and WHILE
        "xla_gpu_graph_min_graph_size": 1,
    },
}


def options_of(platform: str, answers: bool = False) -> dict[str, Any]:
    """Returns the compiler options of a program.

    Args:
        platform: "cpu", "gpu" or "tpu".
        answers: whether the program generates answers, which adds `ANSWERING`.
    """
    return OPTIONS.get(platform, {}) | (ANSWERING.get(platform, {}) if answers else {})


class Usage(NamedTuple):
    """Memory on one device while a program runs, in bytes.

    Attributes:
        arguments: arguments of the program.
        outputs: outputs that do not reuse the memory of donated arguments.
        temporary: intermediate arrays.
        total: sum of the three.
    """

    arguments: int
    outputs: int
    temporary: int
    total: int


def usage(compiled: jax.stages.Compiled) -> Usage:
    """Returns the memory that the compiler planned for a program on each device."""
    sizes = compiled.memory_analysis()
    outputs = sizes.output_size_in_bytes - sizes.alias_size_in_bytes
    parts = (sizes.argument_size_in_bytes, outputs, sizes.temp_size_in_bytes)
    return Usage(*parts, sum(parts))
