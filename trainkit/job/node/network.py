"""Selects the network interfaces of gloo and NCCL, and sets the variables for them."""

from __future__ import annotations

import fcntl
import socket
import struct
from collections.abc import Mapping
from pathlib import Path

from trainkit.errors import UsageError

PRESETS = ("auto", "ib", "socket", "debug")
SIOCGIFADDR = 0x8915
SIOCGIFFLAGS = 0x8913
IFF_UP = 0x1
IFF_LOOPBACK = 0x8
IFF_RUNNING = 0x40
VIRTUAL = ("docker", "virbr")
"""Prefixes of interfaces that reach no other host; NCCL avoids them too."""
DISCARD_PORT = 9
INFINIBAND = Path("/sys/class/infiniband")


def network_environ(preset: str, peer: str | None) -> tuple[dict[str, str], str]:
    """The variables for a preset or a named interface, and the reason for them in one sentence.

    `peer` is another host of the job; None when all ranks are on this host. gloo gets the interface on the
    route to it. NCCL, which prefers InfiniBand and can use several interfaces, chooses by itself unless the
    config names an interface or this host has only one.

    Raises UsageError when this host has no such interface, or no InfiniBand device for the preset ``ib``.
    """
    if preset not in PRESETS:
        names = [name for _, name in socket.if_nameindex()]
        if preset not in names:
            raise UsageError(
                f"launch.network is {preset}, but {socket.gethostname()} has no such interface",
                hint=f"its interfaces are {', '.join(names)}; presets are {', '.join(PRESETS)}",
            )
        return {**_gloo(preset), **_nccl(preset)}, f"interface {preset}: set by launch.network"
    if peer is None:
        return _gloo("lo"), "interface lo: all ranks are on this host"
    name = interface_to(peer)
    environ, reason = {}, f"no interface chosen: no route to {peer}"
    if name is not None:
        is_only = usable_interfaces() == [name]
        environ = {**_gloo(name), **(_nccl(name) if is_only else {})}
        reason = f"interface {name}: the route to {peer}{'' if is_only else '; NCCL chooses its own'}"
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


def _gloo(name: str) -> dict[str, str]:
    return {"GLOO_SOCKET_IFNAME": name}


def _nccl(name: str) -> dict[str, str]:
    # NCCL takes a name for a prefix: without the sign, eth1 would include eth10.
    return {"NCCL_SOCKET_IFNAME": f"={name}"}


def interface_to(host: str) -> str | None:
    """The interface on the route to a host; None when unknown."""
    return addresses().get(address_towards(host) or "")


def address_towards(host: str) -> str | None:
    """This host's IPv4 address on the route to another one; None when unknown."""
    try:
        found = socket.getaddrinfo(host, DISCARD_PORT, socket.AF_INET, socket.SOCK_DGRAM)
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect(found[0][4])  # selects a route; sends nothing
            return str(probe.getsockname()[0])
    except OSError:
        return None


def addresses() -> Mapping[str, str]:
    """Mapping from each IPv4 address of this host to its interface."""
    names = [name for _, name in socket.if_nameindex()]
    found = {name: _ask(SIOCGIFADDR, name) for name in names}
    return {socket.inet_ntoa(answer[20:24]): name for name, answer in found.items() if answer is not None}


def usable_interfaces() -> list[str]:
    """The interfaces that can reach other hosts: up, with an IPv4 address, neither loopback nor virtual."""
    return [
        name
        for name in addresses().values()
        if _flags(name) & (IFF_UP | IFF_RUNNING | IFF_LOOPBACK) == IFF_UP | IFF_RUNNING
        and not name.startswith(VIRTUAL)
    ]


def _flags(name: str) -> int:
    answer = _ask(SIOCGIFFLAGS, name)
    return 0 if answer is None else int(struct.unpack("H", answer[16:18])[0])


def _ask(request: int, name: str) -> bytes | None:
    """The kernel's answer about an interface, a struct ifreq; None if it has no such property."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            return fcntl.ioctl(probe.fileno(), request, struct.pack("256s", name.encode()[:15]))
        except OSError:
            return None  # no IPv4 address
