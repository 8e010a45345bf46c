"""Names, network interfaces and ports of a node."""

from __future__ import annotations

import contextlib
import os
import socket

from trainkit.doctor.check import Check, Request, plural
from trainkit.errors import TrainkitError
from trainkit.job.node.network import addresses, network_environ, usable_interfaces
from trainkit.job.node.rendezvous import candidate_ports, choose_port, ephemeral_range, is_free
from trainkit.slurm.hosts import node_addr

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
