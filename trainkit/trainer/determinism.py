"""What two equal runs on GPUs have in common: bits, or all but the rounding of sums in another order."""

from __future__ import annotations

import contextlib
import os
import re
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch
import torch.distributed as dist

from trainkit.cluster.machine import driver_version
from trainkit.plan.launch import LaunchPlan


def fix_kernels(plan: LaunchPlan, deterministic: bool) -> None:
    """Choose kernels by what they compute, not by their times; `deterministic` ones if asked for.

    Call before anything is compiled and before the first collective. Variables that are set stay.
    """
    if plan.device == "cuda":
        # Inductor times several kernels for a sum over a long row; a restart could choose another.
        os.environ.setdefault("TORCHINDUCTOR_DETERMINISTIC", "1")
    if not deterministic:
        return
    torch.use_deterministic_algorithms(True)  # kernels without one raise an error
    # Finds reads of memory that nothing has written. It would write every buffer that FSDP gathers into.
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # without it cuBLAS raises an error
    if plan.world_size > 1:
        # The ring adds in the order of the ranks, which are numbered host by host; NVLS adds in any order.
        os.environ.setdefault("NCCL_ALGO", "Ring")


def computed_on(device: torch.device) -> dict[str, str | int | None]:
    """The hardware and libraries on which the bits of results depend."""
    found: dict[str, str | int | None] = {"torch": torch.__version__, "threads": torch.get_num_threads()}
    if device.type != "cuda":
        name = re.search(r"^model name\s*:\s*(.+)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
        instructions = torch.backends.cpu.get_cpu_capability()  # that torch uses
        return {**found, "processor": f"{name[1] if name else 'CPU'} with {instructions}"}
    with contextlib.suppress(PackageNotFoundError):  # a build of torch without it
        found["triton"] = version("triton")
    nccl = torch.cuda.nccl.version() if dist.is_nccl_available() else ()  # type: ignore[no-untyped-call]
    return {
        **found,
        "processor": torch.cuda.get_device_name(device),
        "cudnn": torch.backends.cudnn.version(),  # type: ignore[no-untyped-call]
        "nccl": ".".join(map(str, nccl)),
        "driver": driver_version(),
    }
