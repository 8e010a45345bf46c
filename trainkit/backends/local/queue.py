"""The queue on this machine: runs wait in submission order until enough GPUs or CPU cores are free.

A run needs one GPU or core per rank. Each GPU, core and waiting run has a lock file in a folder for this user
and machine. The supervisor that owns a lock keeps it until it exits, so a killed process or a crashed machine
leaves no lock behind. A GPU that another process uses without a lock, for example a process of another user,
is also considered busy.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from trainkit.cluster.machine import NoDriver, gpu_handle, num_usable_cpus, nvml
from trainkit.folders import ensure_folder, state_folder
from trainkit.formats import plural
from trainkit.job.processes import proc_file
from trainkit.job.rank_env import VISIBLE, visible_gpus
from trainkit.locks import LockBusy, acquire_lock, file_lock, is_locked, owner_of, release_lock
from trainkit.plan.launch import LaunchPlan
from trainkit.run.end import read_newest_end
from trainkit.run.group import RunGroup, group_of
from trainkit.run.record import is_alive, read_job
from trainkit.run.rundir import AttemptDir, RunDir

LOCK_TIMEOUT_S = 10.0
MAX_USERS = 3
"""Maximum number of runs that a message lists as users of busy GPUs or cores."""


class Unit(NamedTuple):
    """A GPU or a CPU core."""

    key: str
    """An identifier for the GPU or core that does not depend on CUDA_VISIBLE_DEVICES."""
    user: str | None = None
    """A process that uses the GPU, if the driver reports one."""


@dataclass
class QueuePlace:
    """An attempt's place in the queue, and the locks that the attempt holds."""

    attempt: AttemptDir
    plan: LaunchPlan
    submitted_at: str | None
    """The time when the attempt was submitted; determines the order in the queue."""
    folder: Path = field(default_factory=lambda: state_folder() / "queue" / os.uname().nodename)
    _ticket: tuple[Path, int] | None = None

    def take(self, *, now: bool) -> str | None:
        """Lock GPUs or cores for the attempt until this process exits, and hide all others from the ranks.

        Returns the reason to wait, or None once the required GPUs or cores are locked. If `now` is set, the
        attempt takes GPUs or cores even if they are in use. Raises OSError if the folder with the lock files
        cannot be written or locked.
        """
        if (reason := _unfinished(self.plan)) is not None:
            return reason
        if (visible := self.plan.environment.variables.get(VISIBLE)) is not None:
            os.environ[VISIBLE] = visible
        ensure_folder(self.folder, 0o700, parents=True)
        with file_lock(self.folder / ".lock", LOCK_TIMEOUT_S):
            ahead = None if now else self._ahead()
            if ahead is not None:
                return f"waits behind {ahead}"
            cores = {str(index): Unit(f"core {index}") for index in range(num_usable_cpus())}
            units = _gpus() if self.plan.device == "cuda" else cores
            count = min(self.plan.world_size, len(units))
            taken, users = self._lock_free(units, count)
            if len(taken) < count and not now:
                for descriptor in taken.values():
                    release_lock(descriptor)
                what = plural(count, "GPU" if self.plan.device == "cuda" else "CPU core")
                in_use = _named(list(dict.fromkeys(users.values())))
                return f"waits for {what} ({len(taken)} free, in use by {in_use})"
            self.leave()
        if self.plan.device == "cuda" and units:
            # Without this variable, the NVIDIA driver and CUDA number the GPUs differently.
            os.environ.setdefault("CUDA_DEVICE_ORDER", "PCI_BUS_ID")
            os.environ[VISIBLE] = ",".join([*taken, *users][:count])
        return None

    def leave(self) -> None:
        """Leave the queue; called once the attempt has its GPUs or cores, or if it is not going to start."""
        if self._ticket is not None:
            path, descriptor = self._ticket
            self._ticket = None
            path.unlink(missing_ok=True)
            release_lock(descriptor)

    def _ahead(self) -> str | None:
        """Enter the queue if necessary; return the run directly ahead, or None if this run is first."""
        if self._ticket is None:
            path = self.folder / f"{self.plan.device}-{self.submitted_at}-{os.getpid():08d}"
            self._ticket = path, acquire_lock(path, 0.0, owner=str(self.attempt.run.path))
        ahead = None
        for path in sorted(self.folder.glob(f"{self.plan.device}-*")):
            if path == self._ticket[0]:
                break
            if is_locked(path):
                ahead = owner_of(path)
            else:
                path.unlink(missing_ok=True)
        return ahead

    def _lock_free(self, units: Mapping[str, Unit], count: int) -> tuple[dict[str, int], dict[str, str]]:
        """Return the lock file descriptors for up to `count` free units, and the users of busy units."""
        taken, users = dict[str, int](), dict[str, str]()
        for name, (key, user) in units.items():
            if len(taken) == count:
                break
            path = self.folder / f"{key}.lock"
            try:
                descriptor = acquire_lock(path, 0.0, owner=str(self.attempt.run.path))
            except LockBusy:
                users[name] = owner_of(path)
                continue
            if user is None:
                taken[name] = descriptor
            else:
                release_lock(descriptor)
                users[name] = user
        return taken, users


def _named(users: list[str]) -> str:
    more = f" and {len(users) - MAX_USERS:,} more" if len(users) > MAX_USERS else ""
    return f"{', '.join(users[:MAX_USERS])}{more}"


def _gpus() -> dict[str, Unit]:
    """Map CUDA_VISIBLE_DEVICES entries to GPUs that this process may use; empty without an NVIDIA driver."""
    listed = visible_gpus(os.environ.get(VISIBLE))
    with suppress(NoDriver), nvml() as driver, suppress(driver.NVMLError):
        count = driver.nvmlDeviceGetCount()
        names = map(str, range(count)) if listed is None else listed
        return {name: _gpu(driver, name) for name in names}
    return {}


def _gpu(driver: Any, name: str) -> Unit:
    key, users = name, list[str]()
    with suppress(driver.NVMLError):  # the ranks report a lost GPU or a MIG device
        handle = gpu_handle(driver, name)
        key = str(driver.nvmlDeviceGetUUID(handle))
        users = [_process(item.pid) for item in driver.nvmlDeviceGetComputeRunningProcesses(handle)]
    return Unit(f"gpu {key}", next(iter(users), None))


def _process(pid: int) -> str:
    name = proc_file(pid, "comm").decode(errors="replace").strip()
    return f"process {pid} ({name})" if name else f"process {pid}"


def _unfinished(plan: LaunchPlan) -> str | None:
    """Return a message about the first unfinished run for which the plan waits, or None if there is none."""
    for folder in plan.after:
        for run in _runs(Path(folder)):
            end = read_newest_end(run.path)
            if end is None or end.resumes:
                return f"waits for {run.path}{_trouble(run)} to finish"
            if end.state != "finished":
                return f"waits until {run.path}, which ended as {end.state}, is resumed and finishes"
    return None


def _trouble(run: RunDir) -> str:
    """Return what the user must do so that a stopped run can finish, or "" if no action is required."""
    if not run.path.exists():
        return ", which does not exist," if group_of(run) is None else ""
    newest = read_job(run).newest
    return ", which has died, to be resumed and" if newest and is_alive(run, newest) is False else ""


def _runs(folder: Path) -> Iterator[RunDir]:
    group = RunGroup(folder)
    if group.exists():
        yield from map(group.run, group.trials)
    else:
        yield RunDir(folder)
