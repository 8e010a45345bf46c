"""The first process of a host: makes it a host of its own, starts slurmd, and reaps what ends.

Run in fresh network, UTS, IPC, mount and PID namespaces, with nothing but the standard library; the one
argument is a JSON object. The host is powered off by killing this process: the kernel kills the rest.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
from pathlib import Path


def run(*argv: str) -> None:
    subprocess.run(argv, check=True)


def make_host(host: dict[str, str]) -> None:
    """Hostname, /proc, /sys, boot id, node-local disk and names, as another machine would have them."""
    socket.sethostname(host["name"])
    folder = Path(host["folder"])
    # A /sys of its own shows the host's own network; slurmd wants to see the machine's cgroups in it.
    cgroup = folder / "cgroup"
    if os.path.ismount("/sys/fs/cgroup"):
        run("mount", "--rbind", "/sys/fs/cgroup", str(cgroup))
        run("mount", "-t", "sysfs", "sysfs", "/sys")
        run("mount", "--rbind", str(cgroup), "/sys/fs/cgroup")
        run("umount", "--lazy", str(cgroup))
    run("mount", "--bind", str(folder / "boot_id"), "/proc/sys/kernel/random/boot_id")
    run("mount", "--bind", str(folder / "var-tmp"), "/var/tmp")
    run("mount", "-t", "tmpfs", "tmpfs", "/dev/shm")
    run("mount", "--bind", host["hosts_file"], "/etc/hosts")
    if Path("/etc/resolv.conf").exists():
        # No name server is reached from here; without one named, a look-up fails at once.
        run("mount", "--bind", "/dev/null", "/etc/resolv.conf")


def join_network(host: dict[str, str]) -> None:
    """Wait for the cable and take the address."""
    deadline = time.monotonic() + 120
    while host["interface"] not in {name for _, name in socket.if_nameindex()}:
        if time.monotonic() > deadline:
            raise TimeoutError("nobody plugged a cable in")
        time.sleep(0.005)
    run("ip", "link", "set", "lo", "up")
    run("ip", "address", "add", f"{host['address']}/24", "dev", host["interface"])
    run("ip", "link", "set", host["interface"], "up")


def main() -> None:
    host = json.loads(sys.argv[1])
    make_host(host)
    join_network(host)
    subprocess.Popen(["slurmd", "-D", "-N", host["name"], "-f", host["slurm_conf"]])
    while True:
        try:
            os.wait()
        except ChildProcessError:
            time.sleep(0.2)


if __name__ == "__main__":
    main()
