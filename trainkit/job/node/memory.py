"""The memory of a host, and of the job or process on it, as the kernel counts it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

PROC = Path("/proc")
CGROUPS = Path("/sys/fs/cgroup")
GIB = 2**30


def kernel_lines(path: Path) -> list[list[str]]:
    """The words of each line of a file of the kernel that has some; none if it cannot be read."""
    try:
        return [words for line in path.read_text().splitlines() if (words := line.split())]
    except OSError:
        return []


def host_memory_gib() -> tuple[float, float] | None:
    """Used and total memory of the host in GiB; None where the kernel does not say."""
    kib = {words[0]: int(words[1]) for words in kernel_lines(PROC / "meminfo") if len(words) > 1}
    total, available = kib.get("MemTotal:"), kib.get("MemAvailable:")
    if total is None or available is None:
        return None
    return round((total - available) / 2**20, 2), round(total / 2**20, 2)


def _memory_cgroups() -> Iterator[tuple[Path, Path, bool]]:
    """(root, path below it, whether of version 2) of the control groups that count this process's memory."""
    for words in kernel_lines(PROC / "self" / "cgroup"):
        _, controllers, path = " ".join(words).split(":", 2)
        if controllers == "" or "memory" in controllers.split(","):
            root = CGROUPS / "memory" if controllers else CGROUPS
            yield root, Path(path.lstrip("/")), not controllers


def job_memory_gib() -> float | None:
    """The memory that the kernel accounts to this job, or else to this process's control group, in GiB."""
    for root, own, is_new in _memory_cgroups():
        job = next((folder for folder in (own, *own.parents) if folder.name.startswith("job_")), own)
        found = kernel_lines(root / job / ("memory.current" if is_new else "memory.usage_in_bytes"))
        if found:
            return round(int(found[0][0]) / GIB, 3)
    return None


def count_oom_kills() -> int | None:
    """The number of processes in this cgroup that the OOM killer has killed; None if there is no counter."""
    for root, own, is_new in _memory_cgroups():
        for name, *value in kernel_lines(root / own / ("memory.events" if is_new else "memory.oom_control")):
            if name == "oom_kill":
                return int(value[0])
    return None
