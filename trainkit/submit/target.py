"""Where a run is started: Slurm where there is one, else this machine."""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping
from pathlib import Path

from trainkit.plan.cluster import Cluster, Target

CONFIG_FILES = (
    *("/etc/slurm/slurm.conf", "/etc/slurm-llnl/slurm.conf", "/usr/local/etc/slurm.conf"),
    "/run/slurm/conf/slurm.conf",
)


def choose_backend(asked: str, environ: Mapping[str, str] = os.environ) -> tuple[str, str]:
    """The backend that `launch.backend` means here, and why in one sentence."""
    if asked != "auto":
        return asked, f"launch.backend: {asked} was asked for"
    sbatch = shutil.which("sbatch", path=environ.get("PATH", os.defpath))
    if sbatch is None:
        return "local", "local: there is no sbatch on PATH"
    if environ.get("SLURM_CONF") or environ.get("SLURM_CONF_SERVER"):
        return "sbatch", f"sbatch: {sbatch} is there, and SLURM_CONF names a cluster"
    configured = next((name for name in CONFIG_FILES if Path(name).exists()), None)
    if configured is not None:
        return "sbatch", f"sbatch: {sbatch} and {configured} are there"
    return "local", f"local: {sbatch} is there, but no slurm.conf: no cluster is set up here"


def make_target(
    asked: str, cluster: Cluster | None = None, environ: Mapping[str, str] = os.environ
) -> Target:
    """The target of a config; `cluster` is what is known about it."""
    backend, reason = choose_backend(asked, environ)
    if backend == "local":
        return Target("local", reason)
    return Target("submitit" if backend == "submitit" else "sbatch", reason, cluster or Cluster("unknown"))
