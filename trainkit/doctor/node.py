"""The checks of one node: its cores, names, network interface and ports, and what other files check.

``python -m trainkit.doctor.node REQUEST`` prints them and the facts by which nodes are compared, as JSON.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from trainkit.doctor.bandwidth import Layout, link_gbit_s, run_ranks
from trainkit.doctor.check import Check, Request, plural
from trainkit.doctor.disk import SHM_HINT, TMP_HINT, check_folder, check_space, file_server_offset_s
from trainkit.doctor.environment import check_python, check_torch, versions
from trainkit.doctor.gpus import check_gpus, driver_versions, num_gpus
from trainkit.errors import TrainkitError
from trainkit.job.node.health import host_memory_gib
from trainkit.job.node.network import PRESETS, addresses, interface_to, network_environ, usable_interfaces
from trainkit.job.node.rendezvous import candidate_ports, choose_port, ephemeral_range, is_free
from trainkit.run.process import own_host
from trainkit.slurm.hosts import expand_hosts, node_addr

PREFIX, CHUNK_CHARS = "trainkit-doctor", 700


def check_node(request: Request) -> Iterator[Check]:
    """The checks of this host, the cheap ones first."""
    yield check_python(request)
    yield check_cpus()
    yield from check_gpus()
    yield check_name(request)
    yield check_interface(request)
    yield check_ports(request)
    yield from check_folder(request)
    yield check_space("/tmp", Path(os.environ.get("TMPDIR") or "/tmp"), TMP_HINT)
    yield check_space("/dev/shm", Path("/dev/shm"), SHM_HINT)
    if not request.quick:
        yield from check_torch(request)


def check_cpus() -> Check:
    """The cores of this process, and the load and memory of the host."""
    count = len(os.sched_getaffinity(0))
    load = os.getloadavg()[0]
    value = f"{count} CPU cores for this process, load {load:.1f}"
    memory = host_memory_gib()
    if memory is not None:
        value += f"; {memory[1] - memory[0]:,.1f} of {memory[1]:,.1f} GiB of memory available"
    if load > 2 * count:
        return Check("CPU", "warning", value, "other programs use this host: `top` shows them")
    return Check("CPU", "ok", value)


def node_facts(request: Request) -> dict[str, Any]:
    """What must be the same on all nodes, and what a measurement of the bandwidth needs to know."""
    interface = interface_to(request.peers[0]) if request.peers else None
    return {
        "host": own_host(),
        "peers": request.peers,
        "versions": {**versions(request), **driver_versions()},
        "links": link_gbit_s(interface if request.network in PRESETS else request.network),
        "num_gpus": num_gpus(),
        "ports": free_ports(),
        "file_server_offset_s": file_server_offset_s(request),
    }


def measure(request: Request, layout: Layout) -> dict[str, Any]:
    """Measure the bandwidth as the host of a layout; returns what `run_ranks` does."""
    peer = request.peers[0] if request.peers else None
    try:
        environ, _ = network_environ(request.network, peer)
    except TrainkitError as error:
        return {"error": error.message}
    return run_ranks(layout, own_host(), {**os.environ, **dict(request.env), **environ}, request.python)


def main(argv: Sequence[str] | None = None) -> int:
    """Check this node as the JSON on the command line asks; prints the result for `received`.

    Then measures the bandwidth for each `Layout` that arrives on stdin, and prints that too.
    """
    request = Request.from_json((sys.argv[1:] if argv is None else argv)[0])
    hosts = os.environ.get("SLURM_STEP_NODELIST")
    if hosts is not None:
        peers = tuple(host for host in expand_hosts(hosts) if host != own_host())
        request = replace(request, peers=peers)
    checks = [{**check.to_dict(), "host": own_host()} for check in check_node(request)]
    facts = node_facts(request)
    message = {"kind": "facts", "facts": facts, "checks": checks, "step": _step_to_cancel()}
    send({**message, "time_s": time.time()})  # the reader compares it with its clock
    for line in sys.stdin:
        layout = Layout.from_json(line)
        # Each node finds the first one by its own name service.
        addr = (resolved(layout.hosts[0]) or [layout.addr])[0] if request.peers else layout.addr
        send({"kind": "bandwidth", "bandwidth": measure(request, replace(layout, addr=addr))})
    return 0


def _step_to_cancel() -> str:
    """What `scancel` takes to end this step."""
    step = f"{os.environ.get('SLURM_JOB_ID', '')}.{os.environ.get('SLURM_STEP_ID', '')}"
    return step if step.strip(".") else ""


def send(message: Mapping[str, Any]) -> None:
    """Print a message in short lines: srun mixes what tasks print after each 1,024 bytes."""
    text = json.dumps(message)
    chunks = [text[start : start + CHUNK_CHARS] for start in range(0, len(text), CHUNK_CHARS)]
    for index, chunk in enumerate(chunks, 1):
        print(f"{PREFIX} {own_host()} {index}/{len(chunks)} {chunk}", flush=True)


def received(lines: Iterable[str]) -> Iterator[dict[str, Any]]:
    """The messages of all hosts, from the lines that `send` printed; other lines are skipped."""
    parts: dict[str, str] = {}
    for line in lines:
        if not line.startswith(f"{PREFIX} "):
            continue
        _, host, part, chunk = line.rstrip("\n").split(" ", 3)
        index, _, count = part.partition("/")
        parts[host] = parts.get(host, "") + chunk
        if index == count:
            yield json.loads(parts.pop(host))


NUM_PORTS = 4
"""How many ports a measurement may try."""


def check_name(request: Request) -> Check:
    """Whether the names of the other hosts, and of this one, can be resolved."""
    for name in request.peers:
        found = resolved(name)
        hint = f"add {name} to DNS or /etc/hosts there: the ranks connect to each other by name"
        if not found:
            return Check("name", "failure", f"{name} cannot be resolved, and neither can its NodeAddr", hint)
        if not _addresses_of(name):
            hint = (
                f"trainkit uses its NodeAddr {found[0]}; scripts that use the name fail: add it to /etc/hosts"
            )
            return Check("name", "warning", f"{name} cannot be resolved", hint)
        if all(address.startswith("127.") for address in found):
            hint = (
                f"/etc/hosts there maps {name} to {found[0]}, which other hosts cannot reach: use its address"
            )
            return Check("name", "failure", f"{name} is {', '.join(found)}", hint)
    own = socket.gethostname()
    if not _addresses_of(own):
        hint = f"add {own} to DNS or /etc/hosts: programs that listen at their host's name fail"
        return Check("name", "warning", f"this host's own name {own} cannot be resolved", hint)
    if request.peers:
        return Check("name", "ok", f"{plural(len(request.peers), 'other host')} can be resolved")
    return Check("name", "ok", f"this host is {own}")


def resolved(name: str) -> list[str]:
    """The IPv4 addresses of a host of the step: those of its name, else of its NodeAddr in Slurm."""
    found = _addresses_of(name)
    if not found:
        with contextlib.suppress(TrainkitError):  # then there is none
            found = _addresses_of(node_addr(name, patience_s=0.0))
    return found


def _addresses_of(name: str) -> list[str]:
    try:
        return sorted({str(item[4][0]) for item in socket.getaddrinfo(name, None, socket.AF_INET)})
    except (OSError, UnicodeError):
        return []


def check_interface(request: Request) -> Check:
    """The network interface between the nodes."""
    peer = request.peers[0] if request.peers else None
    try:
        environ, reason = network_environ(request.network, peer)
    except TrainkitError as error:
        return Check("interface", "failure", error.message, error.hint)
    usable, chosen = usable_interfaces(), environ.get("GLOO_SOCKET_IFNAME")
    if chosen not in (None, "lo") and chosen not in usable:
        state = "has no address" if chosen not in addresses().values() else "is down"
        others = f"; usable are {', '.join(usable)}" if usable else ""
        hint = f"`ip link set {chosen} up` as root, or another launch.network{others}"
        return Check("interface", "failure", f"{chosen} {state}", hint)
    if peer is not None and chosen is None:
        hint = "check `ip route`, and set launch.network to the interface between the nodes"
        return Check("interface", "failure", reason, hint)
    return Check("interface", "ok", reason)


def check_ports(request: Request) -> Check:
    """A port at which rank 0 can listen."""
    if request.port is not None:
        if is_free(request.port):
            return Check("port", "ok", f"{request.port} is free")
        hint = f"`ss -ltnp 'sport = :{request.port}'` shows who listens; trainkit chooses a free port itself"
        return Check("port", "failure", f"{request.port} is in use", hint)
    candidates = candidate_ports(str(os.getpid()), 0, ephemeral_range())
    free = [port for port in candidates if is_free(port)]
    value = f"{len(free)} of {len(candidates)} tried ports are free"
    if candidates and not free:
        return Check("port", "failure", value, "`ss -ltn` shows what listens on this host")
    return Check("port", "ok", value)


def free_ports() -> list[int]:
    """Ports of this host at which rank 0 of a measurement can listen."""
    candidates = candidate_ports(str(os.getpid()), 0, ephemeral_range())
    if not candidates:
        return [choose_port(str(os.getpid()), 0)]
    return [port for port in candidates if is_free(port)][:NUM_PORTS]


if __name__ == "__main__":
    sys.exit(main())
