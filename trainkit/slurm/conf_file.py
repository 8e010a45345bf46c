"""Finds slurm.conf and its ClusterName; without a file, whether Slurm fetches it from a controller."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Mapping
from functools import cache
from pathlib import Path

from trainkit.slurm.environment import scrubbed

CONFIG_FILES = (
    *("/etc/slurm/slurm.conf", "/etc/slurm-llnl/slurm.conf", "/usr/local/etc/slurm.conf"),
    "/run/slurm/conf/slurm.conf",
)
_NAME = re.compile(r"^[ \t]*ClusterName[ \t]*=[ \t]*(?P<name>[^\s#]+)", re.MULTILINE | re.IGNORECASE)


def conf_file(environ: Mapping[str, str] = os.environ) -> Path | None:
    """The slurm.conf that Slurm's commands read; None if they fetch it from slurmctld or there is none."""
    named = environ.get("SLURM_CONF")
    if named:
        return Path(named)
    sbatch = shutil.which("sbatch", path=environ.get("PATH", os.defpath))
    # A Slurm built with a custom prefix has its configuration below that prefix.
    prefix = [] if sbatch is None else [Path(os.path.realpath(sbatch)).parent.parent / "etc"]
    in_prefix = [folder / name for folder in prefix for name in ("slurm.conf", "slurm/slurm.conf")]
    return next((path for path in (*map(Path, CONFIG_FILES), *in_prefix) if path.exists()), None)


def cluster_name(environ: Mapping[str, str] = os.environ) -> str | None:
    """The name of the cluster that a job would be submitted to; None if unknown."""
    chosen = scrubbed(environ).get("SLURM_CLUSTERS", "")
    if chosen and "," not in chosen:
        return chosen
    return _conf_cluster_name(environ)


def other_cluster(named: str | None, environ: Mapping[str, str] = os.environ) -> str | None:
    """The cluster of a job if Slurm's commands here use a different one, else None.

    A job id is valid only on its own cluster.
    """
    current = scrubbed(environ).get("SLURM_CLUSTERS") or _conf_cluster_name(environ)
    return named if named and current and named not in current.split(",") else None


def _conf_cluster_name(environ: Mapping[str, str]) -> str | None:
    """The ClusterName in slurm.conf; None without a readable file that sets it."""
    path = conf_file(environ)
    try:
        text = "" if path is None else path.read_text(errors="replace")
    except OSError:
        return None
    match = _NAME.search(text)
    # Slurm converts cluster names to lower case.
    return None if match is None else match["name"].lower()


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
