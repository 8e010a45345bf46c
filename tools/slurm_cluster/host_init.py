"""Init process of a host: set up the host, start slurmd, and reap orphaned processes.

The process runs in new network, UTS, IPC, mount and PID namespaces and uses only the standard library. The
only argument of the process is a JSON object. Killing this process powers off the host, because the kernel
kills all other processes in its PID namespace.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any


def run(*argv: str) -> None:
    subprocess.run(argv, check=True)


def make_host(host: dict[str, Any]) -> None:
    """Set up hostname, /sys, boot id, node-local disks and name resolution, as on a separate machine."""
    socket.sethostname(host["name"])
    folder = Path(host["folder"])
    # A new /sys shows the host's network; slurmd also needs the machine's cgroups in /sys.
    cgroup = folder / "cgroup"
    if host["cgroups"]:
        run("mount", "-t", "sysfs", "sysfs", "/sys")
        run("mount", "-t", "tmpfs", "tmpfs", "/sys/fs/cgroup")
        for controller in host["cgroups"]:
            Path("/sys/fs/cgroup", controller).mkdir()
            run("mount", "-t", "cgroup", "-o", controller, "cgroup", f"/sys/fs/cgroup/{controller}")
    elif os.path.ismount("/sys/fs/cgroup"):
        run("mount", "--rbind", "/sys/fs/cgroup", str(cgroup))
        run("mount", "-t", "sysfs", "sysfs", "/sys")
        run("mount", "--rbind", str(cgroup), "/sys/fs/cgroup")
        run("umount", "--lazy", str(cgroup))
    run("mount", "--bind", str(folder / "boot_id"), "/proc/sys/kernel/random/boot_id")
    run("mount", "--bind", str(folder / "var-tmp"), "/var/tmp")
    run("mount", "-t", "tmpfs", "tmpfs", "/dev/shm")
    run("mount", "--bind", host["hosts_file"], "/etc/hosts")
    if Path("/etc/resolv.conf").exists():
        # No name server is reachable from the host. If no name server is configured, lookups fail
        # immediately.
        run("mount", "--bind", "/dev/null", "/etc/resolv.conf")


def join_network(host: dict[str, Any]) -> None:
    """Wait for the network interface, then assign the host's address to it."""
    deadline = time.monotonic() + 120
    while host["interface"] not in {name for _, name in socket.if_nameindex()}:
        if time.monotonic() > deadline:
            raise TimeoutError(f"no network interface {host['interface']} after 120 s")
        time.sleep(0.005)
    run("ip", "link", "set", "lo", "up")
    run("ip", "address", "add", host["address"], "dev", host["interface"])
    run("ip", "link", "set", host["interface"], "up")


def main() -> None:
    host = json.loads(sys.argv[1])
    make_host(host)
    join_network(host)
    subprocess.Popen(host["slurmd"])
    while True:
        try:
            os.wait()
        except ChildProcessError:
            time.sleep(0.2)


if __name__ == "__main__":
    main()
