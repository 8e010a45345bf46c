"""Detects the memory, CPU cores and GPUs on this machine that a job can use."""

from __future__ import annotations

import contextlib
import math
import os
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

NVIDIA_DRIVER = Path("/proc/driver/nvidia/version")
MEMINFO = Path("/proc/meminfo")
PROC = Path("/proc")
CGROUPS = Path("/sys/fs/cgroup")
GIB = 2**30


@dataclass(frozen=True)
class Machine:
    """The cores, GPUs and memory on this machine that a job can use."""

    num_cpus: int
    num_gpus: int
    gpu_names: tuple[str, ...]
    gpu_reason: str
    """A sentence that lists the GPUs or explains why there are none."""
    memory: int | None = None
    """The total size of memory and swap in bytes, or None if unknown."""
    driver_cuda: tuple[int, int] | None = None
    """The newest CUDA version that the GPU driver supports, or None if unknown."""


def detect_machine() -> Machine:
    """Detect this machine's hardware without torch; query NVML only if an NVIDIA driver is loaded."""
    names, reason, cuda = _gpus()
    return Machine(num_usable_cpus(), len(names), names, reason, host_memory(MEMINFO), cuda)


def num_usable_cpus() -> int:
    """Return the number of CPU cores that this process may use."""
    cores = len(os.sched_getaffinity(0))
    quota = cgroup_cpu_quota(Path("/sys/fs/cgroup"), Path("/proc/self/cgroup"))
    return cores if quota is None else max(1, min(cores, math.floor(quota)))


def host_memory(meminfo: Path) -> int | None:
    """Return the total size of memory and swap in bytes from /proc/meminfo, or None if it cannot be read."""
    kib = _kib(meminfo)
    return 1024 * (kib["MemTotal:"] + kib.get("SwapTotal:", 0)) if "MemTotal:" in kib else None


def _kib(meminfo: Path) -> dict[str, int]:
    """Return the values in /proc/meminfo, keyed by name with a colon; empty if the file cannot be read."""
    return {words[0]: int(words[1]) for words in kernel_lines(meminfo) if len(words) > 1}


def cgroup_cpu_quota(root: Path, membership: Path) -> float | None:
    """Return the smallest CPU quota, in cores, of this process's cgroup (v2) and its parent cgroups.

    Returns None if there is no quota.
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
    """Return the version of the NVIDIA driver, or "" if no driver is loaded."""
    try:
        found = re.search(r"\d+\.[\d.]*\d", NVIDIA_DRIVER.read_text())
    except OSError:
        return ""
    return found[0] if found else "unknown version"


class NoDriver(Exception):
    """Raised if NVML cannot be used; the message is a clause for use in a sentence."""


@contextlib.contextmanager
def nvml() -> Iterator[Any]:
    """Initialize NVML, and shut it down on exit from the context. Raises NoDriver if NVML cannot be used."""
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
    """Return the GPUs' names, a sentence about them, and the newest CUDA version that the driver supports."""
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
        return (), f"CUDA_VISIBLE_DEVICES={chosen} hides all {count} GPU(s) of this machine", cuda
    return (), "an NVIDIA driver is loaded, but reports no GPU", cuda


def driver_cuda(nvml: Any) -> tuple[int, int] | None:
    """Return the newest CUDA version that the driver supports, or None if the driver does not report it."""
    try:
        number = nvml.nvmlSystemGetCudaDriverVersion_v2()
    except nvml.NVMLError:
        return None
    return number // 1000, number % 1000 // 10


def gpu_handle(nvml: Any, name: str) -> Any:
    """Return the NVML handle for a GPU or MIG slice. `name` is an entry of CUDA_VISIBLE_DEVICES.

    Raises NVMLError if there is no such GPU.

    A name is an index, a UUID or the beginning of a UUID:
    https://docs.nvidia.com/cuda/cuda-c-programming-guide/index.html#env-vars
    """
    if name.isdigit():
        return nvml.nvmlDeviceGetHandleByIndex(int(name))
    if name.startswith("GPU-"):
        for index in range(nvml.nvmlDeviceGetCount()):
            with contextlib.suppress(nvml.NVMLError):  # Skip GPUs that do not respond.
                gpu = nvml.nvmlDeviceGetHandleByIndex(index)
                if str(nvml.nvmlDeviceGetUUID(gpu)).startswith(name):
                    return gpu
    return nvml.nvmlDeviceGetHandleByUUID(name)


def visible_names(nvml: Any, chosen: str | None) -> tuple[str, ...]:
    """Return the GPU models in CUDA_VISIBLE_DEVICES up to the first invalid entry, as CUDA does."""
    names, count = [], nvml.nvmlDeviceGetCount()
    for name in map(str, range(count)) if chosen is None else map(str.strip, chosen.split(",")):
        try:
            names.append(str(nvml.nvmlDeviceGetName(gpu_handle(nvml, name))))
        except nvml.NVMLError:
            if not name.isdigit() or int(name) >= count:
                break
            names.append("GPU that does not respond")  # the preflight checks report this GPU
    return tuple(names)


def kernel_lines(path: Path) -> list[list[str]]:
    """Return the fields in each non-blank line of a kernel file; empty if the file cannot be read."""
    try:
        return [words for line in path.read_text().splitlines() if (words := line.split())]
    except OSError:
        return []


def host_memory_gib() -> tuple[float, float] | None:
    """Return the host's used and total memory in GiB, or None if the kernel does not report them."""
    kib = _kib(PROC / "meminfo")
    total, available = kib.get("MemTotal:"), kib.get("MemAvailable:")
    if total is None or available is None:
        return None
    return round((total - available) / 2**20, 2), round(total / 2**20, 2)


def _memory_cgroups() -> Iterator[tuple[Path, Path, bool]]:
    """Yield (root, path below root, is v2) for each cgroup that accounts for this process's memory."""
    for words in kernel_lines(PROC / "self" / "cgroup"):
        _, controllers, path = " ".join(words).split(":", 2)
        if controllers == "" or "memory" in controllers.split(","):
            root = CGROUPS / "memory" if controllers else CGROUPS
            yield root, Path(path.lstrip("/")), not controllers


def job_memory_gib() -> float | None:
    """Return the memory in GiB that the kernel charges to this process's Slurm job.

    Returns None outside a job, or if the job has no cgroup of its own: a login session's cgroup also includes
    the page cache for all files that the user has read.
    """
    for root, own, is_new in _memory_cgroups():
        job = next((folder for folder in (own, *own.parents) if folder.name.startswith("job_")), None)
        name = "memory.current" if is_new else "memory.usage_in_bytes"
        if job is not None and (found := kernel_lines(root / job / name)):
            return round(int(found[0][0]) / GIB, 3)
    return None


def memory_of_gib(pids: Iterable[int]) -> float | None:
    """Return the memory used by processes in GiB. Shared pages are divided among their users (PSS).

    Processes that have exited or belong to another user are not counted; returns None if no process remains.
    """
    files = (kernel_lines(PROC / str(pid) / "smaps_rollup") for pid in pids)
    kib = [int(words[1]) for lines in files for words in lines if words[0] == "Pss:" and len(words) > 1]
    return round(sum(kib) / 2**20, 3) if kib else None


def count_oom_kills() -> int | None:
    """Return how many processes in this cgroup the OOM killer has killed, or None if there is no counter."""
    for root, own, is_new in _memory_cgroups():
        for name, *value in kernel_lines(root / own / ("memory.events" if is_new else "memory.oom_control")):
            if name == "oom_kill":
                return int(value[0])
    return None
