"""Which slurm.conf holds here, and what it calls the cluster; asks nobody."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from trainkit.slurm.client import scrubbed

CONFIG_FILES = (
    *("/etc/slurm/slurm.conf", "/etc/slurm-llnl/slurm.conf", "/usr/local/etc/slurm.conf"),
    "/run/slurm/conf/slurm.conf",
)
_NAME = re.compile(r"^[ \t]*ClusterName[ \t]*=[ \t]*(?P<name>[^\s#]+)", re.MULTILINE | re.IGNORECASE)


def conf_file(environ: Mapping[str, str] = os.environ) -> Path | None:
    """The slurm.conf that Slurm's commands read; None where they ask a server for it, or there is none."""
    named = environ.get("SLURM_CONF")
    if named:
        return Path(named)
    sbatch = shutil.which("sbatch", path=environ.get("PATH", os.defpath))
    # A Slurm of one's own build is configured below its own prefix.
    prefix = [] if sbatch is None else [Path(os.path.realpath(sbatch)).parent.parent / "etc"]
    own_build = [folder / name for folder in prefix for name in ("slurm.conf", "slurm/slurm.conf")]
    return next((path for path in (*map(Path, CONFIG_FILES), *own_build) if path.exists()), None)


def cluster_name(environ: Mapping[str, str] = os.environ) -> str | None:
    """What Slurm calls the cluster that a job would go to; None where no file says it."""
    chosen = scrubbed(environ).get("SLURM_CLUSTERS", "")
    if chosen and "," not in chosen:
        return chosen
    return _written_name(environ)


def other_cluster(record: Mapping[str, Any], environ: Mapping[str, str] = os.environ) -> str | None:
    """The cluster that a job went to, as its record says, where Slurm's commands ask another one from here.

    A job id means something on its own cluster only.
    """
    named = record.get("cluster")
    asked = scrubbed(environ).get("SLURM_CLUSTERS") or _written_name(environ)
    return str(named) if named and asked and named not in asked.split(",") else None


def _written_name(environ: Mapping[str, str]) -> str | None:
    """ClusterName of slurm.conf."""
    path = conf_file(environ)
    try:
        text = "" if path is None else path.read_text(errors="replace")
    except OSError:
        return None
    match = _NAME.search(text)
    # Slurm knows cluster names in lower case only.
    return None if match is None else match["name"].lower()
