"""Network of a cluster: a bridge, a veth pair per host, and lines in /etc/hosts."""

from __future__ import annotations

import ipaddress
import re
import socket
import subprocess
from pathlib import Path

from tools.slurm_cluster.state import State, network_of

HOSTS_FILE = Path("/etc/hosts")
MACHINE_INDEX = 1022
"""Index of this machine's address, which is the last address of the cluster's network."""
NEIGHBOURS = Path("/proc/sys/net/ipv4/neigh/default")
NEIGHBOURS_PER_HOST = 32
"""Number of entries per host in the neighbour table. The kernel has one neighbour table for all hosts, by
default with 1,024 entries."""
INSIDE = "eth0"
"""Name of the interface inside a host."""


def ip(*args: str, check: bool = True) -> str:
    """Run `ip` and return its stdout; raise RuntimeError if it fails and `check` is true."""
    done = subprocess.run(["ip", *args], capture_output=True, text=True, timeout=60)
    if check and done.returncode:
        raise RuntimeError(f"`ip {' '.join(args)}` failed: {done.stderr.strip()}")
    return done.stdout


def is_free(number: int, port: int) -> bool:
    """Return whether the interface names, addresses and ports of a cluster with this number are unused."""
    used = re.findall(r"\d+\.\d+\.\d+\.\d+", ip("-o", "address") + ip("route"))
    if any(ipaddress.ip_address(address) in network_of(number) for address in used):
        return False
    if f": tk{number}:" in ip("-o", "link"):
        return False
    for offset in range(2):
        with socket.socket() as probe:
            try:
                probe.bind(("0.0.0.0", port + offset))
            except OSError:
                return False
    return True


def make_bridge(state: State) -> None:
    """Create the bridge that connects all hosts and this machine."""
    prefix = network_of(state.number).prefixlen
    # The limits remain in effect until the machine is rebooted.
    for name in ("gc_thresh3", "gc_thresh2", "gc_thresh1"):
        limit, needed = NEIGHBOURS / name, NEIGHBOURS_PER_HOST * state.num_hosts
        if int(limit.read_text()) < needed:
            limit.write_text(f"{needed}")
    ip("link", "add", state.name, "type", "bridge")
    ip(
        "address",
        "add",
        f"{state.address(MACHINE_INDEX)}/{prefix}",
        "dev",
        state.name,
    )
    ip("link", "set", state.name, "up")
    # slurmdbd sends each message in two packets, and would otherwise wait 40 ms for the acknowledgement of
    # the first packet.
    route = ("local", state.address(MACHINE_INDEX), "dev", state.name, "table", "local", "proto", "kernel")
    ip("route", "change", *route, "scope", "host", "src", state.address(MACHINE_INDEX), "quickack", "1")


def remove_bridge(state: State) -> None:
    """Remove the bridge and all veth pairs, if they exist."""
    for index in state.hosts():
        unplug(state, index)
    ip("link", "delete", state.name, check=False)


def cable(state: State, index: int) -> str:
    """Return the name of a host's interface on this machine."""
    return state.host(index).replace("-node", "h")


def plug_in(state: State, index: int, namespace_pid: int) -> None:
    """Create a veth pair between the bridge and the network namespace of a process."""
    outside = cable(state, index)
    inside = ("peer", "name", INSIDE, "netns", str(namespace_pid))
    ip("link", "add", outside, "master", state.name, "type", "veth", *inside)
    ip("link", "set", outside, "up")


def unplug(state: State, index: int) -> None:
    """Remove a host's veth pair, if it exists."""
    ip("link", "delete", cable(state, index), check=False)


def set_cable(state: State, index: int, up: bool) -> None:
    """Set the link of a host up or down."""
    ip("link", "set", cable(state, index), "up" if up else "down")


def names(state: State) -> str:
    """Return the lines of /etc/hosts for the hosts."""
    return "".join(f"{state.address(index)} {state.host(index)}\n" for index in state.hosts())


def hosts_file_inside(state: State) -> str:
    """Return the complete /etc/hosts of a host, which maps this machine to the address of the bridge.

    A failed lookup takes seconds, after which Slurm reports "credential expired".
    """
    known = f"{state.address(MACHINE_INDEX)} {state.machine}\n{names(state)}"
    # Dual-stack sockets look up IPv4-mapped addresses, but lookups by name must not return these addresses.
    mapped = "".join(f"::ffff:{line}.mapped\n" for line in known.splitlines())
    return f"127.0.0.1 localhost\n::1 localhost ip6-localhost\n{known}{mapped}"


def add_names(state: State) -> None:
    """Add the names of the hosts, and of this machine as the login node, to the machine's /etc/hosts."""
    # Newer versions of slurmctld look up the name of every client, which takes seconds if a name server is
    # used.
    new = f"{names(state)}{state.address(MACHINE_INDEX)} {state.name}-login\n"
    try:
        socket.gethostbyname(state.machine)
    except OSError:
        new += f"{state.address(MACHINE_INDEX)} {state.machine}\n"
    lines = "".join(f"{line} {_marker(state)}\n" for line in new.splitlines())
    before = _others(state)
    if before and not before.endswith("\n"):
        before += "\n"
    HOSTS_FILE.write_text(before + lines)


def remove_names(state: State) -> None:
    """Remove this cluster's lines from the machine's /etc/hosts."""
    kept = _others(state)
    if kept != HOSTS_FILE.read_text():
        HOSTS_FILE.write_text(kept)


def _others(state: State) -> str:
    lines = HOSTS_FILE.read_text().splitlines(keepends=True)
    return "".join(line for line in lines if not line.rstrip().endswith(_marker(state)))


def _marker(state: State) -> str:
    return f"# trainkit-cluster {state.name}"
