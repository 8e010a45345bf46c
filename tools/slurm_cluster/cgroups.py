"""Control groups of hosts, for clusters whose Slurm confines jobs with proctrack/cgroup and task/cgroup.

Each host gets a group below that of the process that starts it, and sees it as the root of the hierarchy.
"""

from __future__ import annotations

import os
import re
import time
from pathlib import Path

from tools.slurm_cluster.packages import NotPossible
from tools.slurm_cluster.state import State

ROOT = Path("/sys/fs/cgroup")
CONTROLLERS = ("cpuset", "memory", "freezer")
"""What Slurm needs to confine the CPUs and the memory of a job and to find its processes."""
ENTER = 'while [ "$1" != -- ]; do echo $$ > "$1/cgroup.procs" || exit; shift; done; shift; exec "$@"'
REMOVE_TIMEOUT_S = 10.0


def require() -> None:
    """Raise NotPossible unless this machine has the controllers of cgroup v1."""
    missing = [name for name in CONTROLLERS if not os.access(ROOT / name / "cgroup.procs", os.W_OK)]
    if missing:
        what = (
            f"a cluster with cgroups needs writable cgroup v1 controllers, and {', '.join(missing)} is none"
        )
        raise NotPossible(what, "start it without --cgroups")


def create(state: State, index: int) -> list[Path]:
    """Create the groups of a host, one for each controller."""
    groups = [_own_group(controller) / state.host(index) for controller in CONTROLLERS]
    for group in groups:
        group.mkdir(exist_ok=True)
        for name in ("cpuset.cpus", "cpuset.mems"):
            if (group / name).exists():
                (group / name).write_text((group.parent / name).read_text())
    return groups


def inside(groups: list[Path], argv: list[str]) -> list[str]:
    """The argv that runs a command in these groups."""
    return ["sh", "-c", ENTER, "sh", *map(str, groups), "--", *argv]


def remove(state: State, index: int) -> None:
    """Remove the groups of a host whose processes were killed, if they exist. Raises OSError."""
    deadline_s = time.monotonic() + REMOVE_TIMEOUT_S
    for controller in CONTROLLERS:
        for group in (ROOT / controller).rglob(state.host(index)):
            for folder, _, _ in os.walk(group, topdown=False):
                _remove_folder(Path(folder), deadline_s)


def _remove_folder(group: Path, deadline_s: float) -> None:
    while group.exists():
        try:
            group.rmdir()
        except OSError:
            # A group is busy until the last of its killed processes has been reaped.
            if time.monotonic() > deadline_s:
                raise
            time.sleep(0.02)


def _own_group(controller: str) -> Path:
    """The group of this process in the hierarchy of a controller."""
    text = Path("/proc/self/cgroup").read_text()
    found = re.search(rf"^\d+:(?:[^:\n]*,)?{controller}(?:,[^:\n]*)?:(.*)$", text, re.MULTILINE)
    assert found is not None, text
    return ROOT / controller / found[1].lstrip("/")
