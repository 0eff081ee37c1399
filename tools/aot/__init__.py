"""Compiling for GPUs and TPUs on a machine that has neither: `python -m tools.aot`."""
