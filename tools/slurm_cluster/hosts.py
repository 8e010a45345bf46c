"""Powering hosts on and off: each is a process in namespaces of its own, with slurmd below it."""

from __future__ import annotations

import json
import subprocess
import sys
import uuid
from collections.abc import Sequence
from pathlib import Path

from tools.slurm_cluster import network
from tools.slurm_cluster.daemons import environ, record
from tools.slurm_cluster.processes import child_of, start_daemon
from tools.slurm_cluster.state import State

NAMESPACES = ("--net", "--uts", "--ipc", "--mount", "--pid")
INIT = Path(__file__).with_name("host_init.py")


def folder(state: State, index: int) -> Path:
    """What a host has on its own disk."""
    return state.path / "hosts" / state.host(index)


def power_on(state: State, index: int) -> None:
    """Start a host: again with the disk that it had, and with another boot id."""
    home = folder(state, index)
    for name in ("spool", "var-tmp", "cgroup"):
        (home / name).mkdir(parents=True, exist_ok=True)
    (home / "var-tmp").chmod(0o1777)
    (home / "boot_id").write_text(f"{uuid.uuid4()}\n")
    host = {
        "name": state.host(index),
        "address": state.address(index),
        "folder": str(home),
        "interface": network.INSIDE,
        "hosts_file": str(state.path / "etc/hosts"),
        "slurm_conf": environ(state)["SLURM_CONF"],
    }
    unshare = ["unshare", *NAMESPACES, "--fork", "--kill-child", "--mount-proc", "--propagation", "private"]
    python = [sys.executable, "-I", "-S", str(INIT), json.dumps(host)]
    log = state.path / "log" / f"{state.host(index)}.out"
    outer = start_daemon([*unshare, *python], log, environ(state))
    record(state, _outer(index), outer)
    inner = child_of(outer, timeout_s=60)
    record(state, _inner(index), inner)
    network.plug_in(state, index, inner.pid)


def power_off(state: State, index: int) -> None:
    """Cut the power: nobody on the network is told, and nothing on the host is. Off already is fine."""
    network.unplug(state, index)
    for name in (_inner(index), _outer(index)):
        pid = state.processes.pop(name, None)
        if pid is not None:
            pid.kill()
            pid.wait(10)
    state.save()


def is_on(state: State, index: int) -> bool:
    """Whether the host runs."""
    pid = state.processes.get(_inner(index))
    return pid is not None and pid.alive()


def inside(state: State, index: int, argv: Sequence[str], cwd: str) -> list[str]:
    """The command line that runs a command on a host; raises RuntimeError when it is off."""
    if not is_on(state, index):
        raise RuntimeError(f"{state.host(index)} is off")
    enter = ["nsenter", f"--target={state.processes[_inner(index)].pid}", *NAMESPACES]
    return [*enter, "--", "sh", "-c", 'cd "$1" && shift && exec "$@"', "sh", cwd, *argv]


def signal_slurmd(state: State, index: int, number: int) -> bool:
    """Send a signal to the daemon of a host, jobs on it go on; whether it was there. 0 only asks."""
    pid = (folder(state, index) / "slurmd.pid").read_text().strip()
    argv = inside(state, index, ["kill", f"-{number}", pid], "/")
    return subprocess.run(argv, capture_output=True, timeout=60).returncode == 0


def _outer(index: int) -> str:
    return f"host{index}-outer"


def _inner(index: int) -> str:
    return f"host{index}"
