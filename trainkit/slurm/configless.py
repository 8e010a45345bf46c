"""Whether Slurm's commands find a cluster without a slurm.conf: they may fetch it from the controller."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Mapping
from functools import cache
from pathlib import Path

PROBE_TIMEOUT_S = 5.0
# The resolver waits 5 s for an answer by default, so one lost packet would take all the time of the probe.
RESOLVER = {"RES_OPTIONS": "timeout:1 attempts:4"}
ROUTES = (Path("/proc/net/route"), Path("/proc/net/ipv6_route"))
_NO_CONFIG = re.compile(r"DNS SRV lookup failed|slurm\.conf: No such file|[Uu]nable to (?:status|open) file")
_DNS_UNAVAILABLE = re.compile(r"Host name lookup failure|Temporary failure|[Tt]imed out")


def finds_cluster(environ: Mapping[str, str]) -> bool | None:
    """Whether sbatch, which must be on PATH, finds a configuration; None if that is unclear.

    Runs one command at most once for each environment. Without a slurm.conf Slurm looks its controller up in
    DNS: an answer that there is none differs from no answer.
    """
    return _finds_cluster(tuple(sorted(environ.items())))


@cache
def _finds_cluster(variables: tuple[tuple[str, str], ...]) -> bool | None:
    try:
        done = subprocess.run(
            ["sbatch", "--version"],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=PROBE_TIMEOUT_S,
            env=RESOLVER | dict(variables),
            check=False,
        )
    except subprocess.TimeoutExpired:
        return None
    if done.returncode == 0:
        return True
    answer = done.stderr.decode(errors="replace")
    if not _NO_CONFIG.search(answer):
        return None
    return None if _DNS_UNAVAILABLE.search(answer) and _has_network() else False


def _has_network() -> bool:
    """Whether this machine has a route that is not to itself: without one it is no login node."""
    lines = [line.split() for file in ROUTES if file.exists() for line in file.read_text().splitlines()]
    # The interface is the first field of an IPv4 route and the last one of an IPv6 route.
    return any("lo" not in (fields[0], fields[-1]) and fields[0] != "Iface" for fields in lines if fields)
