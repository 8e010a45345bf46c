"""Where the ranks of a job meet: a port that is free now and that no outgoing connection will take."""

from __future__ import annotations

import hashlib
import socket
from pathlib import Path

from trainkit.errors import TrainkitError

LOCAL_ADDR = "127.0.0.1"
"""Where rank 0 listens when all nodes are this machine."""

NUM_CANDIDATES = 64
LOWEST_PORT = 10_000
HIGHEST_PORT = 65_000
DEFAULT_EPHEMERAL = (32_768, 60_999)


def ephemeral_range(path: str = "/proc/sys/net/ipv4/ip_local_port_range") -> tuple[int, int]:
    """The ports that the kernel gives to outgoing connections, both ends included."""
    try:
        low, high = Path(path).read_text().split()
        return int(low), int(high)
    except (OSError, ValueError):
        return DEFAULT_EPHEMERAL


def port_pool(ephemeral: tuple[int, int]) -> list[int]:
    """All ports outside the ephemeral range that ranks may meet at."""
    low, high = ephemeral
    return [port for port in range(LOWEST_PORT, HIGHEST_PORT) if not low <= port <= high]


def candidate_ports(job_id: str, attempt: int, ephemeral: tuple[int, int]) -> list[int]:
    """Ports outside the ephemeral range, in an order that differs from job to job and attempt to attempt.

    Empty when the ephemeral range leaves none.
    """
    pool = port_pool(ephemeral)
    if not pool:
        return []
    digest = hashlib.sha256(f"{job_id}/{attempt}".encode()).digest()
    start = int.from_bytes(digest[:8], "big")
    return [pool[(start + 101 * index) % len(pool)] for index in range(NUM_CANDIDATES)]


def is_free(port: int) -> bool:
    """Whether rank 0 could listen here; torch's store binds all addresses, so this does too."""
    with socket.socket() as probe:
        try:
            probe.bind(("", port))
        except OSError:
            return False
    return True


def choose_port(job_id: str, attempt: int) -> int:
    """A free port for this attempt's rendezvous on this machine."""
    candidates = candidate_ports(job_id, attempt, ephemeral_range())
    if not candidates:
        with socket.socket() as probe:
            probe.bind(("", 0))
            return int(probe.getsockname()[1])
    for port in candidates:
        if is_free(port):
            return port
    raise TrainkitError(
        f"no free port for the rendezvous: tried {len(candidates)} "
        f"between {min(candidates)} and {max(candidates)}",
        hint="`ss -ltn` shows what listens on this machine",
    )
