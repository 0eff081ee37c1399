"""Compiler options that the backbones need."""

# Compiler options for CPUs. The XLA of jax 0.10 slices bfloat16 by way of float32 and moves the
# conversion of the whole stack of layers out of their loop, unless told not to. And it fetches all
# matrices of a layer before it uses the first; one after the other they stay in the processor's
# cache, which makes decoding twice as fast. Accelerators do neither.
CPU_OPTIONS = {
    "xla_disable_hlo_passes": "while-loop-invariant-code-motion",
    "xla_cpu_scheduler_type": "CPU_SCHEDULER_TYPE_MEMORY_OPTIMIZED",
}
