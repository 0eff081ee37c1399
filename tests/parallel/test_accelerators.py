"""The table of accelerators: names of devices, and peaks."""

import pytest

from stepprune_jax.parallel.accelerators import ACCELERATORS, known_as


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        ("NVIDIA RTX A6000", "rtx-a6000"),
        ("NVIDIA L40S", "l40s"),
        ("NVIDIA A100-SXM4-40GB", "a100-40"),
        ("NVIDIA A100 80GB PCIe", "a100-80"),
        ("NVIDIA H100 PCIe", "h100-pcie"),
        ("NVIDIA H100 80GB HBM3", "h100"),
        ("TPU v5 lite", "tpu-v5e"),
        ("TPU v5", "tpu-v5p"),
        ("NVIDIA L4", None),
        ("NVIDIA GH200 480GB", None),
    ],
)
def test_a_device_is_identified_by_words_of_its_kind(kind, name):
    assert known_as(kind) == name


def test_peaks_equal_the_product_of_tensor_cores_and_clock_rate():
    """The numbers are tensor cores, dense operations per core and clock, and the boost clock."""
    for name, num_cores, operations, clock in (
        ("rtx-a6000", 336, 256, 1.80e9),
        ("rtx-4090", 512, 128, 2.52e9),
        ("a100-80", 432, 512, 1.41e9),
        ("h100", 528, 1024, 1.83e9),
    ):
        expected = num_cores * operations * clock
        assert ACCELERATORS[name].flops == pytest.approx(expected, rel=2e-3), name
