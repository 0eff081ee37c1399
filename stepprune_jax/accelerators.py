"""What accelerators can do, as their vendors' data sheets say."""

from typing import NamedTuple


class Accelerator(NamedTuple):
    """One device.

    Attributes:
        flops: peak operations a second in bfloat16 with float32 sums, without sparsity.
        memory: bytes, at 10^9 to the gigabyte.
    """

    flops: float
    memory: float


ACCELERATORS = {
    "rtx-a6000": Accelerator(154.8e12, 48e9),
    "rtx-4090": Accelerator(165.2e12, 24e9),
    "l40s": Accelerator(362e12, 48e9),
    "a100-40": Accelerator(312e12, 40e9),
    "a100-80": Accelerator(312e12, 80e9),
    "h100": Accelerator(989e12, 80e9),
    "h200": Accelerator(989e12, 141e9),
    "tpu-v4": Accelerator(275e12, 32e9),
    "tpu-v5e": Accelerator(197e12, 16e9),
    "tpu-v5p": Accelerator(459e12, 95e9),
    "tpu-v6e": Accelerator(918e12, 32e9),
}
