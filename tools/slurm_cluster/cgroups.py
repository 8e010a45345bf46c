"""Manages the control groups of hosts, for clusters that confine jobs with proctrack/cgroup and task/cgroup.

Each host has a group below the group of the process that starts the host. Inside the host, this group is the
root of the hierarchy.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from tools.slurm_cluster.packages import NotPossible
from tools.slurm_cluster.state import State

ROOT = Path("/sys/fs/cgroup")
CONTROLLERS = ("cpuset", "memory", "freezer")
"""Controllers that Slurm needs to confine a job's CPUs and memory, and to find the job's processes."""
ENTER = 'while [ "$1" != -- ]; do echo $$ > "$1/cgroup.procs" || exit; shift; done; shift; exec "$@"'
REMOVE_TIMEOUT_S = 10.0
CPU_PERIOD_US = 50_000
"""Period of the CPU limit in microseconds, shorter than a training step, so that a limited process runs
slowly instead of being interrupted."""


def require() -> None:
    """Raise NotPossible unless this machine has the controllers of cgroup v1."""
    missing = [name for name in CONTROLLERS if not os.access(ROOT / name / "cgroup.procs", os.W_OK)]
    if missing:
        what = (
            f"a cluster with cgroups needs writable cgroup v1 controllers, and {', '.join(missing)} is none"
        )
        raise NotPossible(what, "start it without --cgroups")


def create(state: State, index: int) -> list[Path]:
    """Create the groups of a host, one per controller."""
    groups = [_own_group(controller) / state.host(index) for controller in CONTROLLERS]
    for group in groups:
        group.mkdir(exist_ok=True)
        for name in ("cpuset.cpus", "cpuset.mems"):
            if (group / name).exists():
                (group / name).write_text((group.parent / name).read_text())
    return groups


def inside(groups: list[Path], argv: list[str]) -> list[str]:
    """Return the argv that runs a command in the given groups."""
    return ["sh", "-c", ENTER, "sh", *map(str, groups), "--", *argv]


def remove(state: State, index: int) -> None:
    """Remove the groups of a host whose processes were killed; raise OSError if that fails."""
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
            # A group remains busy until the last of its killed processes has been reaped.
            if time.monotonic() > deadline_s:
                raise
            time.sleep(0.02)


@contextmanager
def cpu_limited(host: str, pids: Callable[[], list[int]], cpus: float) -> Iterator[None]:
    """Limit the total CPU time of all processes of a host to `cpus` CPUs while the block runs.

    `pids` returns the process ids of the host. Raises NotPossible if the ``cpu`` controller of cgroup v1 is
    not available.
    """
    own = _own_group("cpu") if (ROOT / "cpu/cgroup.procs").exists() else None
    if own is None or not (own / "cpu.cfs_quota_us").exists():
        raise NotPossible("a limit of CPU time needs the controller cpu of cgroup v1", "use another machine")
    group = own / f"{host}-limited"
    group.mkdir()
    try:
        (group / "cpu.cfs_period_us").write_text(f"{CPU_PERIOD_US}")
        (group / "cpu.cfs_quota_us").write_text(f"{round(cpus * CPU_PERIOD_US)}")
        while outside := set(pids()) - set(map(int, (group / "cgroup.procs").read_text().split())):
            _move(outside, group)  # processes started in the meantime are moved in the next iteration
        yield
    finally:
        while inside := (group / "cgroup.procs").read_text().split():
            _move(map(int, inside), own)
        _remove_folder(group, time.monotonic() + REMOVE_TIMEOUT_S)


def _move(pids: Iterable[int], group: Path) -> None:
    for pid in pids:
        with suppress(ProcessLookupError):
            (group / "cgroup.procs").write_text(f"{pid}")


def _own_group(controller: str) -> Path:
    """Return the group of this process in the hierarchy of a controller."""
    text = Path("/proc/self/cgroup").read_text()
    found = re.search(rf"^\d+:(?:[^:\n]*,)?{controller}(?:,[^:\n]*)?:(.*)$", text, re.MULTILINE)
    assert found is not None, text
    return ROOT / controller / found[1].lstrip("/")
