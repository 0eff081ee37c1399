"""Settings for every test, made before jax starts.

Eight virtual CPU devices, and machine code generated without optimisation: most of the suite's
time is compiling small programs, and their results do not depend on it.
"""

import os

FLAGS = (
    "--xla_force_host_platform_device_count=8",
    "--xla_backend_optimization_level=0",
    "--xla_llvm_disable_expensive_passes=true",
)
os.environ["XLA_FLAGS"] = " ".join((os.environ.get("XLA_FLAGS", ""), *FLAGS))
