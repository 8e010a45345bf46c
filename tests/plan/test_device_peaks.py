"""Peaks by the names that drivers report."""

from __future__ import annotations

import pytest

from trainkit.plan.gpus import peak_flops


@pytest.mark.parametrize(
    ("name", "bf16", "fp16"),
    [
        ("NVIDIA H100 80GB HBM3", 989e12, 989e12),
        ("NVIDIA H100 PCIe", 756e12, 756e12),
        ("NVIDIA H100 NVL", 835.5e12, 835.5e12),
        ("NVIDIA H200", 989e12, 989e12),
        ("NVIDIA GH200 480GB", 989e12, 989e12),
        ("NVIDIA B200", 2.25e15, 2.25e15),
        ("NVIDIA GB200", 2.5e15, 2.5e15),
        ("NVIDIA B300 SXM6 AC", 2.25e15, 2.25e15),
        ("NVIDIA GB300", 2.5e15, 2.5e15),
        ("NVIDIA H100 80GB HBM3 MIG 1g.10gb", None, None),
        ("NVIDIA A100-SXM4-80GB", 312e12, 312e12),
        ("NVIDIA A100-PCIE-40GB", 312e12, 312e12),
        ("NVIDIA L40S", 362e12, 362e12),
        ("NVIDIA L40", 181e12, 181e12),
        ("NVIDIA L4", 121e12, 121e12),
        ("NVIDIA A10G", 70e12, 70e12),
        ("NVIDIA A10", 125e12, 125e12),
        ("NVIDIA H20", 148e12, 148e12),
        ("Tesla V100-SXM2-16GB", None, 125e12),
        ("Tesla T4", None, 65e12),
        ("NVIDIA RTX A6000", 154.8e12, 154.8e12),
        ("NVIDIA Something New", None, None),
        ("cpu", None, None),
    ],
)
def test_peak(name: str, bf16: float | None, fp16: float | None) -> None:
    assert (peak_flops(name, "bf16"), peak_flops(name, "fp16")) == (bf16, fp16)


def test_fp32_is_not_known() -> None:
    assert peak_flops("NVIDIA H100 80GB HBM3", "fp32") is None
