"""Finds slurm.conf and its ClusterName without running Slurm's commands."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Mapping
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
