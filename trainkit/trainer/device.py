"""The device a rank computes on: selection, memory, peak speed."""

from __future__ import annotations

import resource

import torch

from trainkit.errors import TrainkitError
from trainkit.plan.gpus import peak_flops


def select_device(kind: str, local_rank: int) -> torch.device:
    """The device of this rank; `kind` is ``cpu`` or ``cuda``.

    Raises TrainkitError when torch sees fewer GPUs than this node has ranks.
    """
    if kind == "cpu":
        return torch.device("cpu")
    count = torch.cuda.device_count()
    if local_rank >= count:
        raise TrainkitError(
            f"local rank {local_rank} has no GPU: torch sees {count} on this node",
            hint="ask for fewer workers a node, or look at CUDA_VISIBLE_DEVICES and `nvidia-smi`",
        )
    device = torch.device("cuda", local_rank)
    torch.cuda.set_device(device)
    return device


def peak_memory_gib(device: torch.device) -> float:
    """Most memory this process has held so far: of the GPU, else resident memory of the process."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2**30
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 2**30


def device_peak_flops(device: torch.device, dtype: str) -> float | None:
    """Dense FLOP/s of this device for `dtype`, None where it is not known."""
    if device.type == "cpu":
        return None
    return peak_flops(torch.cuda.get_device_name(device), dtype)
