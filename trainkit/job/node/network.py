"""Selects the network interface that reaches the other nodes, and sets the variables for NCCL and gloo."""

from __future__ import annotations

import fcntl
import socket
import struct
from collections.abc import Mapping
from pathlib import Path

from trainkit.errors import UsageError

PRESETS = ("auto", "ib", "socket", "debug")
SIOCGIFADDR = 0x8915
DISCARD_PORT = 9
INFINIBAND = Path("/sys/class/infiniband")


def network_environ(preset: str, peer: str | None) -> tuple[dict[str, str], str]:
    """The variables for a preset or a named interface, and the reason for them in one sentence.

    `peer` is another host of the job; None when all ranks are on this host.
    Raises UsageError when this host has no such interface, or no InfiniBand device for the preset ``ib``.
    """
    if preset not in PRESETS:
        names = [name for _, name in socket.if_nameindex()]
        if preset not in names:
            raise UsageError(
                f"launch.network is {preset}, but {socket.gethostname()} has no such interface",
                hint=f"its interfaces are {', '.join(names)}; presets are {', '.join(PRESETS)}",
            )
        return _interface(preset), f"interface {preset}: set by launch.network"
    if peer is None:
        return {"GLOO_SOCKET_IFNAME": "lo"}, "interface lo: all ranks are on this host"
    name = interface_to(peer)
    environ = {} if name is None else _interface(name)
    reason = f"interface {name}: the route to {peer}" if name else f"no interface chosen: no route to {peer}"
    if preset == "ib":
        if not INFINIBAND.is_dir() or not any(INFINIBAND.iterdir()):
            raise UsageError(
                f"launch.network is ib, but {socket.gethostname()} has no InfiniBand device",
                hint="`launch.network: socket` uses TCP",
            )
        return {**environ, "NCCL_IB_DISABLE": "0"}, f"{reason}; InfiniBand for NCCL"
    if preset == "socket":
        return {**environ, "NCCL_IB_DISABLE": "1"}, f"{reason}; NCCL uses sockets only"
    if preset == "debug":
        debug = {"NCCL_DEBUG": "INFO", "TORCH_DISTRIBUTED_DEBUG": "DETAIL", "TORCH_CPP_LOG_LEVEL": "INFO"}
        return {**environ, **debug}, f"{reason}; debug logs of NCCL and torch.distributed"
    return environ, reason


def _interface(name: str) -> dict[str, str]:
    return {"GLOO_SOCKET_IFNAME": name, "NCCL_SOCKET_IFNAME": name}


def interface_to(host: str) -> str | None:
    """The interface on the route to a host; None when unknown."""
    try:
        found = socket.getaddrinfo(host, DISCARD_PORT, socket.AF_INET, socket.SOCK_DGRAM)
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect(found[0][4])  # selects a route; sends nothing
            address = probe.getsockname()[0]
    except OSError:
        return None
    return addresses().get(address)


def addresses() -> Mapping[str, str]:
    """Mapping from each IPv4 address of this host to its interface."""
    found = {}
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            request = struct.pack("256s", name.encode()[:15])
            try:
                answer = fcntl.ioctl(probe.fileno(), SIOCGIFADDR, request)
            except OSError:
                continue  # no IPv4 address
            found[socket.inet_ntoa(answer[20:24])] = name
    return found
