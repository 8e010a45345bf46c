"""Slurm's environment: the slurm.conf in use, and the variables set by jobs, steps and launchers."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Mapping
from functools import cache, lru_cache
from pathlib import Path

from trainkit.scheduler import OWN_PREFIX, RANK_VARIABLES

CONFIG_FILES = (
    "/etc/slurm/slurm.conf",
    "/etc/slurm-llnl/slurm.conf",
    "/usr/local/etc/slurm.conf",
    "/run/slurm/conf/slurm.conf",
)
_NAME = re.compile(r"^[ \t]*ClusterName[ \t]*=[ \t]*(?P<name>[^\s#]+)", re.MULTILINE | re.IGNORECASE)


def conf_file(environ: Mapping[str, str] = os.environ) -> Path | None:
    """Return the slurm.conf that Slurm's commands read; None if there is none, or if slurmctld serves it."""
    named = environ.get("SLURM_CONF")
    if named:
        return Path(named)
    sbatch = shutil.which("sbatch", path=environ.get("PATH", os.defpath))
    # If Slurm was built with its own installation prefix, slurm.conf is below that prefix.
    prefix = [] if sbatch is None else [Path(os.path.realpath(sbatch)).parent.parent / "etc"]
    in_prefix = [folder / name for folder in prefix for name in ("slurm.conf", "slurm/slurm.conf")]
    return next((path for path in (*map(Path, CONFIG_FILES), *in_prefix) if path.exists()), None)


def cluster_name(environ: Mapping[str, str] = os.environ) -> str | None:
    """Return the name of the cluster to which a job would be submitted, or None if unknown."""
    chosen = _chosen_cluster(environ)
    return None if chosen and "," in chosen else chosen


def other_cluster(named: str | None, environ: Mapping[str, str] = os.environ) -> str | None:
    """Return `named`, a job's cluster, or None if Slurm's commands use this cluster by default.

    If the result is not None, pass the cluster to Slurm's commands, because a job id is valid only on its own
    cluster.
    """
    current = _chosen_cluster(environ) if named else None
    return named if current and named != current else None


def _chosen_cluster(environ: Mapping[str, str]) -> str | None:
    """Return SLURM_CLUSTERS, or else the ClusterName in slurm.conf, or None if slurm.conf cannot be read."""
    if named := scrubbed(environ).get("SLURM_CLUSTERS"):
        return named
    path = conf_file(environ)
    try:
        return None if path is None else _name_in(path, path.stat().st_mtime_ns)
    except OSError:
        return None


@lru_cache(maxsize=4)
def _name_in(path: Path, mtime_ns: int) -> str | None:
    match = _NAME.search(path.read_text(errors="replace"))
    # Slurm converts cluster names to lowercase.
    return None if match is None else match["name"].lower()


PROBE_TIMEOUT_S = 5.0
# By default, the resolver waits 5 s for an answer, so a single lost packet would use up the probe's timeout.
RESOLVER = {"RES_OPTIONS": "timeout:1 attempts:4"}
ROUTES = (Path("/proc/net/route"), Path("/proc/net/ipv6_route"))
_NO_CONFIG = re.compile(r"DNS SRV lookup failed|slurm\.conf: No such file|[Uu]nable to (?:status|open) file")
_DNS_UNAVAILABLE = re.compile(r"Host name lookup failure|Temporary failure|[Tt]imed out")


def finds_cluster() -> bool | None:
    """Return whether sbatch, which must be on PATH, finds a Slurm configuration; None if that is unclear.

    The probe runs at most once for each environment. If there is no slurm.conf, Slurm looks up its controller
    in DNS. The result is False if DNS answers that there is no controller, and None if DNS does not answer.
    """
    return _finds_cluster(tuple(sorted(os.environ.items())))


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
    """Return whether this machine has a network route to other machines, as every login node does."""
    lines = [line.split() for file in ROUTES if file.exists() for line in file.read_text().splitlines()]
    # The interface name is the first field in an IPv4 route, but the last field in an IPv6 route.
    return any("lo" not in (fields[0], fields[-1]) and fields[0] != "Iface" for fields in lines if fields)


KEPT = frozenset({"SLURM_CONF", "SLURM_CONF_SERVER", "SLURM_JWT", "SLURM_CLUSTERS", "SLURM_TIME_FORMAT"})
"""Environment variables that select the cluster or authenticate the user; Slurm does not set them inside a
job."""
_PREFIXES = (
    "SLURM_",
    "SLURMD_",
    "SBATCH_",
    "SRUN_",
    "SALLOC_",
    "SPANK_",
    OWN_PREFIX,
    "PMI_",
    "PMI2_",
    "PMIX_",
    "PALS_",
    "TORCHELASTIC_",
    "OMPI_COMM_WORLD_",
    "OMPI_UNIVERSE_",
    "OMPI_MCA_ess",
    "OMPI_MCA_orte_",
    "PRTE_",
    "ORTE_",
    "MV2_COMM_WORLD_",
    "MPI_LOCAL",
)
_RANK_NAMES = frozenset({*RANK_VARIABLES, "ROLE_NAME", "CROSS_RANK", "CROSS_SIZE"})
_DEVICES_OF_A_JOB = frozenset(
    {
        "CUDA_VISIBLE_DEVICES",
        "GPU_DEVICE_ORDINAL",
        "ROCR_VISIBLE_DEVICES",
        "HIP_VISIBLE_DEVICES",
        "ZE_AFFINITY_MASK",
    }
)


def is_inherited(name: str) -> bool:
    """Return whether a variable was set by an enclosing job, step or launcher rather than by the user."""
    return name not in KEPT and (name.startswith(_PREFIXES) or name in _RANK_NAMES)


def scrubbed(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the environment for sbatch and salloc, without `SBATCH_*` and variables of the enclosing job.

    `SBATCH_*` variables are removed because they would override the options in the script. Inside a job,
    variables that bind the job's GPUs are also removed. SBATCH_CLUSTERS is renamed to SLURM_CLUSTERS, which
    all Slurm commands understand.
    """
    is_in_job = "SLURM_JOB_ID" in environ or "SLURM_JOBID" in environ
    clean = {
        name: value
        for name, value in environ.items()
        if not is_inherited(name) and not (is_in_job and name in _DEVICES_OF_A_JOB)
    }
    if "SBATCH_CLUSTERS" in environ:
        clean.setdefault("SLURM_CLUSTERS", environ["SBATCH_CLUSTERS"])
    return clean
