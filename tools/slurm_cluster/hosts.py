"""Power hosts on and off; each host is a process in separate namespaces, with slurmd as its child."""

from __future__ import annotations

import json
import subprocess
import sys
import uuid
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from tools.slurm_cluster import cgroups, network
from tools.slurm_cluster.daemons import environ, record, slurmd
from tools.slurm_cluster.processes import child_of, start_daemon
from tools.slurm_cluster.state import State, network_of

NAMESPACES = ("--net", "--uts", "--ipc", "--mount", "--pid")
INIT = Path(__file__).with_name("host_init.py")


def folder(state: State, index: int) -> Path:
    """Return the folder with a host's node-local disks."""
    return state.path / "hosts" / state.host(index)


def power_on(state: State, index: int) -> None:
    """Start a host; a restarted host keeps its disks but gets a new boot id."""
    home = folder(state, index)
    for name in ("spool", "var-tmp", "cgroup"):
        (home / name).mkdir(parents=True, exist_ok=True)
    (home / "var-tmp").chmod(0o1777)
    (home / "boot_id").write_text(f"{uuid.uuid4()}\n")
    host = {
        "name": state.host(index),
        "address": f"{state.address(index)}/{network_of(state.number).prefixlen}",
        "folder": str(home),
        "interface": network.INSIDE,
        "hosts_file": str(state.path / "etc/hosts"),
        "cgroups": list(cgroups.CONTROLLERS) if state.cgroups else [],
        "slurmd": [*slurmd(state, index), "-D"],
    }
    argv = ["unshare", *NAMESPACES, "--fork", "--kill-child", "--mount-proc", "--propagation", "private"]
    argv += [sys.executable, "-I", "-S", str(INIT), json.dumps(host)]
    if state.cgroups:
        # The root of a cgroup namespace is the cgroup of its first process, so enter the host's groups before
        # `unshare`.
        argv = cgroups.inside(cgroups.create(state, index), ["unshare", "--cgroup", *argv[1:]])
    log = state.path / "log" / f"{state.host(index)}.out"
    outer = start_daemon(argv, log, environ(state))
    record(state, _outer(index), outer)
    inner = child_of(outer, timeout_s=60)
    record(state, _inner(index), inner)
    network.plug_in(state, index, inner.pid)


def power_off(state: State, index: int) -> None:
    """Power off a host without informing its processes or the network; do nothing if the host is off."""
    network.unplug(state, index)
    for name in (_inner(index), _outer(index)):
        pid = state.processes.pop(name, None)
        if pid is not None:
            pid.kill()
            pid.wait(10)
    if state.cgroups:
        cgroups.remove(state, index)
    state.save()


def is_on(state: State, index: int) -> bool:
    """Return whether the host is powered on."""
    pid = state.processes.get(_inner(index))
    return pid is not None and pid.alive()


def processes(state: State, index: int) -> list[int]:
    """Return the pids of all processes of a running host, as seen from this machine."""
    namespace = Path(f"/proc/{state.processes[_inner(index)].pid}/ns/pid").readlink()
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with suppress(OSError):  # the process has exited
                if (entry / "ns/pid").readlink() == namespace:
                    found.append(int(entry.name))
    return found


def inside(state: State, index: int, argv: Sequence[str], cwd: str) -> list[str]:
    """Return the argv that runs a command on a host in `cwd`; raise RuntimeError if the host is off."""
    if not is_on(state, index):
        raise RuntimeError(f"{state.host(index)} is off")
    enter = ["nsenter", f"--target={state.processes[_inner(index)].pid}", *NAMESPACES]
    return [*enter, "--", "sh", "-c", 'cd "$1" && shift && exec "$@"', "sh", cwd, *argv]


def signal_slurmd(state: State, index: int, number: int) -> bool:
    """Send a signal to the slurmd of a host, but not to its jobs; return whether slurmd was running.

    Signal 0 only checks whether slurmd is running.
    """
    pid = (folder(state, index) / "slurmd.pid").read_text().strip()
    argv = inside(state, index, ["kill", f"-{number}", pid], "/")
    return subprocess.run(argv, capture_output=True, timeout=60).returncode == 0


def _outer(index: int) -> str:
    return f"host{index}-outer"


def _inner(index: int) -> str:
    return f"host{index}"
