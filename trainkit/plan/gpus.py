"""Looks up GPU types by the names that drivers and clusters use, and determines the GPU types of a run."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import TYPE_CHECKING, NamedTuple

from trainkit.errors import KeyProblem
from trainkit.formats import MIB

if TYPE_CHECKING:
    from trainkit.cluster.machine import Machine
    from trainkit.cluster.target import Target
    from trainkit.config.running import ResourcesConfig
    from trainkit.config.schema import RunConfig
    from trainkit.plan.facts import Facts

Version = tuple[int, int]
RESTART_S = 300.0
"""Assumed seconds from a failure, or from the end of a job, to the next training step; not measured.
"""
USABLE = 0.92
"""Fraction of a GPU's memory available for tensors; CUDA, NCCL and allocator fragmentation take the rest."""


class Gpu(NamedTuple):
    """A type of GPU."""

    name: str
    """NVIDIA's name, with the memory size if there are variants."""
    memory: int
    """Memory in bytes, as reported by the driver."""
    most_memory: int
    """Memory in bytes of the largest GPU variant with this name, used as an upper bound."""
    node_size: int
    """Number of GPUs per node in typical systems."""
    node_bandwidth: float
    """Bandwidth per GPU to other GPUs on the same node, in bytes per second per direction."""
    network_bandwidth: float
    """Bandwidth per GPU to other nodes, in bytes per second per direction."""
    peak_flops: float | None
    """Peak dense FLOP/s with 16-bit inputs; None if unknown."""

    @property
    def capability(self) -> Version | None:
        """Return the compute capability if it is below 8.0, that is, without bf16 tensor cores; else None."""
        return FP16_ONLY.get(self.name.partition(" ")[0])

    @property
    def usable(self) -> int:
        """Return the number of bytes of GPU memory that a plan may use."""
        return int(self.memory * USABLE)


# Each tuple contains the bandwidth per GPU within the node and to other nodes, in GB/s per direction, and the
# number of GPUs per node. NVLink bandwidths are half the figures in the data sheets, which count both
# directions. Network bandwidths are for DGX and HGX systems, which have one network port per GPU.
_NVLINK5_72 = 900, 50, 4
_NVLINK5 = 900, 50, 8
_NVLINK4 = 450, 50, 8
_NVLINK3 = 300, 25, 8
_NVLINK2 = 150, 12.5, 8
_ONE = 64, 25, 1
_PCIE5 = 50, 12.5, 8
_PCIE4 = 25, 6.25, 8
_PCIE3 = 12, 6.25, 8

# Each row contains the words in the GPU's name, its memory sizes, its bandwidths, and its dense tensor-core
# FLOP/s with 16-bit inputs. The memory sizes map each advertised size in GB, the most common one first, to
# the size in MiB that nvidia-smi reports, which is smaller because of error correction. The FLOP/s are half
# of the figures "with sparsity" in NVIDIA's data sheets. The first row that matches a GPU's name is used.
# GB300 is listed with the same memory size as B300.
_ROWS: tuple[tuple[str, dict[int, int], tuple[float, float, int], float | None], ...] = (
    ("GB300", {288: 275_040}, _NVLINK5_72, 2.5e15),
    ("GB200", {186: 189_471}, _NVLINK5_72, 2.5e15),
    ("B300", {288: 275_040}, _NVLINK5, 2.25e15),
    ("B200", {180: 183_359}, _NVLINK5, 2.25e15),
    ("GH200", {96: 97_871, 144: 146_831}, _ONE, 989e12),
    ("H200 NVL", {141: 143_771}, _NVLINK4, 835.5e12),
    ("H200", {141: 143_771}, _NVLINK4, 989e12),
    ("H100 NVL", {94: 95_830}, _PCIE5, 835.5e12),
    ("H100 PCIe", {80: 81_559}, _PCIE5, 756e12),
    ("H100", {80: 81_559, 94: 95_830, 64: 65_247}, _NVLINK4, 989e12),
    ("H800", {80: 81_559}, _NVLINK3, 989e12),
    ("H20", {96: 97_871, 141: 143_771}, _NVLINK4, 148e12),
    ("A100 PCIe", {80: 81_920, 40: 40_960}, _PCIE4, 312e12),
    ("A100", {80: 81_920, 40: 40_960, 64: 65_536}, _NVLINK3, 312e12),
    ("A800", {80: 81_920, 40: 40_960}, _NVLINK3, 312e12),
    ("A30", {24: 24_576}, _PCIE4, 165e12),
    ("A40", {48: 46_068}, _PCIE4, 149.7e12),
    ("A10G", {24: 23_028}, _PCIE4, 70e12),
    ("A10", {24: 23_028}, _PCIE4, 125e12),
    ("L40S", {48: 46_068}, _PCIE4, 362e12),
    ("L40", {48: 46_068}, _PCIE4, 181e12),
    ("L4", {24: 23_034}, _PCIE4, 121e12),
    ("V100", {32: 32_768, 16: 16_384}, _NVLINK2, 125e12),
    ("T4", {16: 15_360}, _PCIE3, 65e12),
    ("RTX PRO 6000", {96: 97_887}, _PCIE5, None),
    ("RTX 6000 Ada", {48: 49_140}, _PCIE4, 364.2e12),
    ("RTX A6000", {48: 49_140}, _PCIE4, 154.8e12),
    ("RTX A5000", {24: 24_564}, _PCIE4, None),
    ("RTX 5090", {32: 32_607}, _PCIE5, None),
    ("RTX 4090", {24: 24_564}, _PCIE4, 165.2e12),
    ("RTX 3090", {24: 24_576}, _PCIE4, 71e12),
)
FP16_ONLY: dict[str, Version] = {"V100": (7, 0), "T4": (7, 5)}
"""Maps each GPU whose tensor cores lack bf16 support to its compute capability."""
_NO_PRODUCT = re.compile(r"NVIDIA|TESLA|GEFORCE|QUADRO")


def find_gpu(name: str) -> Gpu | None:
    """Return the GPU type for a name that a driver or cluster uses.

    Examples of names are ``NVIDIA A100-SXM4-40GB`` and ``a100``. Returns None for an unknown name or a MIG
    device.
    """
    words = re.sub(r"[^A-Z0-9]+", " ", _NO_PRODUCT.sub(" ", name.upper())).split()
    if "MIG" in words:
        return None
    for row, sizes, links, peak in _ROWS:
        parts = row.upper().split()
        if set(parts) <= set(words) or "".join(parts) in words:  # The name rtx4090 matches RTX 4090.
            # Use the memory size in GB if the name contains one, else the most common size.
            named = [int(match[1]) for word in words if (match := re.fullmatch(r"(\d+)(GB?)?", word))]
            size = next((size for size in named if size in sizes), None)
            gb = size or next(iter(sizes))
            most = sizes[gb] if size else max(sizes.values())
            shown = row if len(sizes) == 1 else f"{row} {gb}GB"
            node, network, node_size = links
            return Gpu(shown, sizes[gb] * MIB, most * MIB, node_size, node * 1e9, network * 1e9, peak)
    return None


def known_gpus() -> tuple[str, ...]:
    """Return the names that `find_gpu` recognizes, newest GPUs first."""
    return tuple(row.lower().replace(" ", "-") for row, *_ in _ROWS)


EXAMPLE = "h100"
"""The GPU type used as an example in messages."""


def gpu_names(config: RunConfig, machine: Machine, target: Target) -> list[str]:
    """Return the names of the GPU types that a job may be allocated; empty if unknown."""
    types = config.resources.gpu_types
    if target.cluster is None or len(types) == 1:
        return list(types or dict.fromkeys(machine.gpu_names))
    # Imported only for Slurm, because a dry run on this machine does not need cluster limits.
    from trainkit.cluster.limits import ResourceRequest, partition_refusals

    request = ResourceRequest.of(config.resources, target.cluster)
    if not types:
        return list(dict.fromkeys(kind for node in request.gpu_nodes for kind in node.gpus))
    refused = partition_refusals(request, target.cluster)
    able = {item.gpu_type(request.constraint) for item in request.partitions if item.name not in refused}
    return [name for name in types if name in able] or list(types)


def known_gpu(names: list[str], resources: ResourcesConfig | None = None) -> Gpu | None:
    """Return the GPU type with the most memory, or with the least if `resources` accepts several types.

    Returns None if any of the `names` is unknown.
    """
    found = [find_gpu(name) for name in names]
    known = [gpu for gpu in found if gpu is not None]
    pick = min if resources is not None and len(resources.gpu_types) > 1 else max
    return pick(known, key=lambda gpu: gpu.most_memory) if known and len(known) == len(found) else None


def shown_types(names: list[str]) -> str:
    """Return the names of GPU types in the form shown in messages."""
    return ", ".join(name or "a GPU without a type" for name in names)


def unchecked_memory(names: list[str]) -> str:
    """Return the warning for GPUs whose memory size is unknown; `names` is the result of `gpu_names`."""
    reason = f"the memory of the GPUs is unknown ({shown_types(names)})"
    if not names:
        reason = "the type of the GPUs is unknown (set resources.gpu_type)"
    return (
        f"whether the run fits into GPU memory was not checked: {reason}; "
        f"`trainkit plan CONFIG --gpu-type {EXAMPLE}` checks the memory for a given GPU type"
    )


def gpu_problems(names: list[str], config: RunConfig, facts: Facts, device: str) -> Iterator[KeyProblem]:
    """Yield the reasons why the trainer cannot use its GPUs; none if the GPUs or the torch build is unknown.

    `names` is the result of `gpu_names`, and is empty for a run on CPUs.
    """
    environment, machine = facts.environment, facts.machine
    torch = None if environment is None else environment.torch
    gpus = list(map(find_gpu, names))
    old = [(gpu.capability, gpu.name) for gpu in gpus if gpu is not None and gpu.capability is not None]
    # If the job can be allocated GPUs of different types, the ranks check the GPUs when they start.
    capability, name = max(old) if old and len(old) == len(gpus) else (None, "")
    if environment is not None and torch is not None:
        # Environment modules or LD_LIBRARY_PATH may provide a CUDA driver library that is newer than the
        # installed driver.
        is_known = facts.target.cluster is None and "LD_LIBRARY_PATH" not in config.launch.env
        driver = machine.driver_cuda if is_known else None
        found = torch.problem(name, capability, driver) if device == "cuda" else None
        if device == "cpu" and config.device == "auto" and torch.hip is not None:
            message = f"torch {torch.version} of {torch.python} is for AMD GPUs, and the run would use CPUs"
            found = message, "AMD GPUs are not supported; use `device: cpu` to train without GPUs"
        if found is not None:
            yield environment.torch_key, *found
    if capability is not None and config.precision.dtype == "bf16":
        yield "precision.dtype", *bf16_problem(name)


def bf16_problem(gpu: str) -> tuple[str, str]:
    """Return why a run cannot train in bf16 on a GPU in `FP16_ONLY`, and a hint."""
    message = f"is bf16, which the tensor cores of {gpu} do not support"
    return message, "set precision.dtype: fp16, or request GPUs of another type with resources.gpu_type"


def peak_flops(device_name: str, dtype: str) -> float | None:
    """Return the peak dense FLOP/s of a device for ``bf16`` or ``fp16``; None if unknown."""
    gpu = find_gpu(device_name)
    if gpu is None or dtype not in ("bf16", "fp16"):
        return None
    return None if dtype == "bf16" and gpu.capability is not None else gpu.peak_flops
