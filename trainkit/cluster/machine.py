"""The hardware of this machine: its memory, the CPU cores of this process, the GPUs that torch would see."""

from __future__ import annotations

import contextlib
import math
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

NVIDIA_DRIVER = Path("/proc/driver/nvidia/version")
MEMINFO = Path("/proc/meminfo")


@dataclass(frozen=True)
class Machine:
    """The cores and GPUs that a job on this machine can use."""

    num_cpus: int
    num_gpus: int
    gpu_names: tuple[str, ...]
    gpu_reason: str
    """One sentence: which GPUs there are, or why there are none."""
    memory: int | None = None
    """Bytes of memory and swap; None if unknown."""
    driver_cuda: tuple[int, int] | None = None
    """The newest CUDA that the driver of its GPUs supports; None if unknown."""


def detect_machine() -> Machine:
    """Detect the hardware of this machine, without torch; queries NVML only if an NVIDIA driver is loaded."""
    names, reason, cuda = _gpus()
    return Machine(num_usable_cpus(), len(names), names, reason, host_memory(MEMINFO), cuda)


def num_usable_cpus() -> int:
    """The number of CPU cores that this process may use."""
    cores = len(os.sched_getaffinity(0))
    quota = cgroup_cpu_quota(Path("/sys/fs/cgroup"), Path("/proc/self/cgroup"))
    return cores if quota is None else max(1, min(cores, math.floor(quota)))


def host_memory(meminfo: Path) -> int | None:
    """The bytes of memory and swap in /proc/meminfo; None if it cannot be read."""
    try:
        lines = meminfo.read_text().splitlines()
    except OSError:
        return None
    kib = {name: int(value.split()[0]) for name, _, value in (line.partition(":") for line in lines)}
    return 1024 * (kib["MemTotal"] + kib.get("SwapTotal", 0)) if "MemTotal" in kib else None


def cgroup_cpu_quota(root: Path, membership: Path) -> float | None:
    """The smallest CPU quota of this process's cgroup (v2) and its parents, in cores.

    None if there is no limit.
    """
    try:
        lines = membership.read_text().splitlines()
    except OSError:
        return None
    path = next((line[3:].strip("/") for line in lines if line.startswith("0::")), "")
    quotas = []
    folder = root / path
    while folder.is_relative_to(root):
        try:
            quota, period = (folder / "cpu.max").read_text().split()
        except OSError:
            quota, period = "max", ""
        if quota != "max":
            quotas.append(int(quota) / int(period))
        folder = folder.parent
    return min(quotas, default=None)


def driver_version() -> str:
    """The version of the NVIDIA driver; empty without one."""
    try:
        found = re.search(r"\d+\.[\d.]*\d", NVIDIA_DRIVER.read_text())
    except OSError:
        return ""
    return found[0] if found else "unknown version"


class NoDriver(Exception):
    """Why NVML cannot be used, as the end of a sentence."""


@contextlib.contextmanager
def nvml() -> Iterator[Any]:
    """NVML while it is initialized. Raises NoDriver."""
    try:
        import pynvml
    except ImportError:
        raise NoDriver("the Python package nvidia-ml-py is missing") from None
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as error:
        raise NoDriver(f"NVML does not answer: {error}") from None
    try:
        yield pynvml
    finally:
        pynvml.nvmlShutdown()


def _gpus() -> tuple[tuple[str, ...], str, tuple[int, int] | None]:
    """The names of the GPUs, why there are these, and the newest CUDA of their driver."""
    if not NVIDIA_DRIVER.exists():
        return (), "there is no NVIDIA driver on this machine", None
    chosen = os.environ.get("CUDA_VISIBLE_DEVICES")
    try:
        with nvml() as driver:
            count, cuda = driver.nvmlDeviceGetCount(), driver_cuda(driver)
            names = visible_names(driver, chosen)
    except NoDriver as error:
        return (), f"an NVIDIA driver is loaded, but {error}", None
    if names:
        suffix = f" (CUDA_VISIBLE_DEVICES={chosen})" if chosen is not None else ""
        kinds = ", ".join(f"{names.count(kind)} x {kind}" for kind in dict.fromkeys(names))
        return names, f"this machine has {kinds}{suffix}", cuda
    if count:
        return (), f"CUDA_VISIBLE_DEVICES={chosen} hides the {count} GPU(s) of this machine", cuda
    return (), "an NVIDIA driver is loaded, but it reports no GPU", cuda


def driver_cuda(nvml: Any) -> tuple[int, int] | None:
    """The newest CUDA that the driver supports; None if it does not say."""
    try:
        number = nvml.nvmlSystemGetCudaDriverVersion_v2()
    except nvml.NVMLError:
        return None
    return number // 1000, number % 1000 // 10


def gpu_handle(nvml: Any, name: str) -> Any:
    """NVML's handle of a GPU or slice by its name in CUDA_VISIBLE_DEVICES. Raises NVMLError.

    A name is an index, a UUID or the beginning of one:
    https://docs.nvidia.com/cuda/cuda-c-programming-guide/index.html#env-vars
    """
    if name.isdigit():
        return nvml.nvmlDeviceGetHandleByIndex(int(name))
    if name.startswith("GPU-"):
        for index in range(nvml.nvmlDeviceGetCount()):
            with contextlib.suppress(nvml.NVMLError):  # one of the others may be lost
                gpu = nvml.nvmlDeviceGetHandleByIndex(index)
                if str(nvml.nvmlDeviceGetUUID(gpu)).startswith(name):
                    return gpu
    return nvml.nvmlDeviceGetHandleByUUID(name)


def visible_names(nvml: Any, chosen: str | None) -> tuple[str, ...]:
    """The models of the GPUs in a value of CUDA_VISIBLE_DEVICES up to the first invalid entry, as in CUDA."""
    names, count = [], nvml.nvmlDeviceGetCount()
    for name in map(str, range(count)) if chosen is None else map(str.strip, chosen.split(",")):
        try:
            names.append(str(nvml.nvmlDeviceGetName(gpu_handle(nvml, name))))
        except nvml.NVMLError:
            if not name.isdigit() or int(name) >= count:
                break
            names.append("GPU that does not respond")  # the checks before the ranks start name it
    return tuple(names)
