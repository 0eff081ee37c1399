"""Compiling for GPUs and TPUs on a machine that has neither: `python -m stepprune_jax.aot`."""
