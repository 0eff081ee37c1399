"""Compiler options that the backbones need, and the memory of compiled programs."""

from typing import Any, NamedTuple

import jax

# Compiler options for programs with weights, by platform.
#
# CPU: XLA of jax 0.10 slices bfloat16 arrays through float32. Its pass for loop-invariant code
# would convert the stack of all layers before the loop over layers, so the pass is disabled. XLA's
# default scheduler fetches all matrices of a layer before it uses the first matrix. The scheduler
# below fetches them one by one, so a matrix stays in the processor's cache until its use.
#
# GPU: XLA merges products that share an operand, such as queries, keys and values. For cuBLAS, this
# copies the matrices into one larger matrix at each call, so merging is disabled. The pass
# "slice-sinker" would convert all stacked int8 layers at once instead of one layer at a time, so it
# is disabled.
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
        total: sum of `arguments`, `outputs` and `temporary`.
    """

    arguments: int
    outputs: int
    temporary: int
    total: int


def usage(compiled: jax.stages.Compiled) -> Usage:
    """Returns the memory that the compiler planned for a program on each device."""
    stats: Any = compiled.memory_analysis()
    arguments, temporary = stats.argument_size_in_bytes, stats.temp_size_in_bytes
    outputs = stats.output_size_in_bytes - stats.alias_size_in_bytes
    return Usage(arguments, outputs, temporary, total=arguments + outputs + temporary)
