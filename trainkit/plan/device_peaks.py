"""Peak dense matrix throughput by device name, for model FLOPs utilization."""

from __future__ import annotations

# A part of the name that the driver reports, and dense tensor-core FLOP/s with 16-bit inputs from
# NVIDIA's data sheets (half of the figure "with sparsity"). The first row that matches counts.
_BF16_PEAKS: tuple[tuple[str, float], ...] = (
    ("GB300", 2.5e15),
    ("B300", 2.25e15),
    ("GB200", 2.5e15),
    ("B200", 2.25e15),
    ("GH200", 989e12),
    ("H200 NVL", 835.5e12),
    ("H200", 989e12),
    ("H100 NVL", 835.5e12),
    ("H100 PCIe", 756e12),
    ("H100", 989e12),
    ("H800", 989e12),
    ("H20", 148e12),
    ("A100", 312e12),
    ("A800", 312e12),
    ("A30", 165e12),
    ("A40", 149.7e12),
    ("A10G", 70e12),
    ("A10", 125e12),
    ("L40S", 362e12),
    ("L40", 181e12),
    ("L4", 121e12),
    ("RTX A6000", 154.8e12),
    ("RTX 6000 Ada", 364.2e12),
    ("RTX 4090", 165.2e12),
    ("RTX 3090", 71e12),
)
_FP16_ONLY_PEAKS: tuple[tuple[str, float], ...] = (("V100", 125e12), ("T4", 65e12))


def peak_flops(device_name: str, dtype: str) -> float | None:
    """Dense FLOP/s of a device for ``bf16`` or ``fp16``; None where it is not known."""
    if dtype not in ("bf16", "fp16"):
        return None
    if "MIG" in device_name.split():
        return None  # a part of it, of one of many sizes
    tables = _BF16_PEAKS if dtype == "bf16" else _BF16_PEAKS + _FP16_ONLY_PEAKS
    words = f"{device_name} ".replace("-", " ")
    return next((peak for part, peak in tables if f"{part} " in words), None)
