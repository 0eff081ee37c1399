"""Which entry of the table a device is."""

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
def test_a_device_is_known_by_the_words_in_its_name(kind, name):
    assert known_as(kind) == name


def test_peaks_follow_from_the_cores_where_the_vendor_counts_them():
    """Tensor cores x dense operations of each in a clock x boost clock, of the white papers."""
    for name, cores, each, clock in (
        ("rtx-a6000", 336, 256, 1.80e9),
        ("rtx-4090", 512, 128, 2.52e9),
        ("a100-80", 432, 512, 1.41e9),
        ("h100", 528, 1024, 1.83e9),
    ):
        assert ACCELERATORS[name].flops == pytest.approx(cores * each * clock, rel=2e-3), name
