"""Whether the kernel killed something of ours for want of memory, as the cgroup counts it."""

from __future__ import annotations

from pathlib import Path

OWN_CGROUPS = Path("/proc/self/cgroup")
CGROUP_ROOT = Path("/sys/fs/cgroup")


def count_oom_kills() -> int | None:
    """How many processes of this one's cgroup were killed for want of memory; None where nobody counts."""
    try:
        lines = OWN_CGROUPS.read_text().splitlines()
    except OSError:
        return None
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            file = CGROUP_ROOT / path.lstrip("/") / "memory.events"
        elif "memory" in controllers.split(","):
            file = CGROUP_ROOT / "memory" / path.lstrip("/") / "memory.oom_control"
        else:
            continue
        count = _oom_kill(file)
        if count is not None:
            return count
    return None


def _oom_kill(file: Path) -> int | None:
    try:
        entries = dict(line.split() for line in file.read_text().splitlines())
        return int(entries["oom_kill"])
    except (OSError, ValueError, KeyError):
        return None  # another version of cgroups, or a kernel that does not count
