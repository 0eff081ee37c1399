"""Specifications of accelerators, from their vendors.

Peaks are for dense products in bfloat16 with float32 sums. NVIDIA's data sheets give peaks "with
sparsity" first. These peaks are twice as high, and are halved here.
"""

from typing import NamedTuple


class Accelerator(NamedTuple):
    """Specification of an accelerator.

    Attributes:
        flops: peak FLOP/s of dense products in bfloat16.
        memory: device memory in bytes.
        kind: texts that jax's `device_kind` of this accelerator contains, all of them.
    """

    flops: float
    memory: float
    kind: tuple[str, ...]


GB, GIB = 10**9, 2**30

# By `config.accelerator.name`. `known_as` uses the first entry whose `kind` matches a device, so
# specific kinds such as "H100 PCIe" come before general kinds such as "H100".
ACCELERATORS = {
    # NVIDIA Ampere GA102 architecture white paper V2.0, appendix C "RTX A6000 GPU Performance";
    # the data sheet of the RTX A6000 has "Tensor performance 309.7 TFLOPS" with sparsity, 48 GB.
    "rtx-a6000": Accelerator(154.8e12, 48 * GB, ("RTX A6000",)),
    # NVIDIA Ada GPU architecture white paper V2.01, appendix A: "Peak BF16 Tensor TFLOPS with FP32
    # Accumulate" of the GeForce RTX 4090: 512 tensor cores x 128 operations x 2.52 GHz.
    "rtx-4090": Accelerator(165.2e12, 24 * GB, ("RTX 4090",)),
    # NVIDIA L40S data sheet, "BFLOAT16 Tensor Core TFLOPS 362.05 | 733", the second with sparsity.
    "l40s": Accelerator(362.05e12, 48 * GB, ("L40S",)),
    # NVIDIA A100 data sheet (nvidia-1758950), "BFLOAT16 Tensor Core 312 TFLOPS | 624 TFLOPS".
    "a100-40": Accelerator(312e12, 40 * GB, ("A100", "40GB")),
    "a100-80": Accelerator(312e12, 80 * GB, ("A100", "80GB")),
    # NVIDIA H100 data sheet, "BFLOAT16 Tensor Core" with sparsity: PCIe 1,513, SXM 1,979 TFLOPS.
    "h100-pcie": Accelerator(756.5e12, 80 * GB, ("H100 PCIe",)),
    "h100": Accelerator(989.5e12, 80 * GB, ("H100",)),
    # NVIDIA H200 data sheet, SXM: "BFLOAT16 Tensor Core" 1,979 TFLOPS with sparsity, 141 GB.
    "h200": Accelerator(989.5e12, 141 * GB, ("NVIDIA H200",)),
    # Google Cloud documentation, "TPU v4", "v5e", "v5p" and "v6e", tables of key specifications:
    # "Peak compute per chip (bf16)" and "HBM capacity". Only the capacity of v4 is given in GiB.
    "tpu-v4": Accelerator(275e12, 32 * GIB, ("TPU v4",)),
    "tpu-v5e": Accelerator(197e12, 16 * GB, ("TPU v5 lite",)),
    "tpu-v5p": Accelerator(459e12, 95 * GB, ("TPU v5",)),
    "tpu-v6e": Accelerator(918e12, 32 * GB, ("TPU v6 lite",)),
}


def known_as(kind: str) -> str | None:
    """Returns the name in `ACCELERATORS` of a jax `device_kind`, or None if it is not listed."""
    for name, accelerator in ACCELERATORS.items():
        if all(text in kind for text in accelerator.kind):
            return name
    return None
