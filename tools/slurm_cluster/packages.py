"""Find and install the Debian packages that a cluster needs."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from tools.slurm_cluster.daemons import path_with_sbin

PROGRAMS = {
    "slurmctld": ("slurmctld",),
    "slurmd": ("slurmd",),
    "slurmdbd": ("slurmdbd",),
    "slurm-client": ("sbatch", "srun", "sacct", "sacctmgr", "scontrol"),
    "munge": ("munged", "munge"),
    "mariadb-server": ("mariadbd", "mariadb-install-db", "mariadb"),
    "iproute2": ("ip",),
    "util-linux": ("unshare", "nsenter", "mount"),
}
"""Maps a package to the programs that a cluster needs from it; the programs may come from another source."""
POLICY = Path("/usr/sbin/policy-rc.d")
INSTALL_TIMEOUT_S = 600


class NotPossible(Exception):
    """Raised if a cluster cannot run on this machine; `hint` suggests a solution."""

    def __init__(self, what: str, hint: str) -> None:
        super().__init__(what)
        self.hint = hint


def missing(with_slurm: bool = True) -> list[str]:
    """Return the packages of missing programs, in `PROGRAMS` order; include Slurm's if `with_slurm`."""
    path = path_with_sbin()
    return [
        package
        for package, programs in PROGRAMS.items()
        if (with_slurm or not package.startswith("slurm"))
        and not all(shutil.which(program, path=path) for program in programs)
    ]


def require(with_slurm: bool = True) -> None:
    """Raise NotPossible if a cluster cannot be started now."""
    if os.geteuid() != 0:
        raise NotPossible("only root can create the namespaces of its hosts", "run this as root")
    if packages := missing(with_slurm):
        raise NotPossible(
            f"{_listed(packages)} not installed",
            f"run: apt-get update && apt-get install --no-install-recommends {' '.join(packages)}",
        )
    if reason := _namespaces_denied():
        raise NotPossible(
            f"this machine does not allow namespaces or bridges: {reason}", "a container needs --privileged"
        )


def install_missing(with_slurm: bool = True) -> None:
    """Install missing packages without starting their daemons; raise NotPossible if that fails."""
    packages = missing(with_slurm)
    if os.geteuid() != 0 or (packages and shutil.which("apt-get") is None):
        require(with_slurm)
    if not packages:
        return
    print(f"installing {' '.join(packages)}, for the tests on a Slurm cluster", file=sys.stderr)
    with no_daemons_started():
        # The package lists of a fresh image are empty and the lists of an old image are outdated, so update
        # them after a failure.
        for args in (("install", *packages), ("update",), ("install", *packages)):
            failure = _apt_get(*args)
            if args[0] == "install" and not failure:
                break
        else:
            print(failure, file=sys.stderr)
            raise NotPossible(
                f"{_listed(packages)} not installed, and apt-get failed", "see its output above"
            )
    require(with_slurm)


@contextlib.contextmanager
def no_daemons_started(policy: Path = POLICY) -> Iterator[None]:
    """Use a policy-rc.d file to prevent Debian from starting daemons when packages are installed."""
    if policy.exists():
        yield
        return
    policy.write_text("#!/bin/sh\nexit 101\n")
    policy.chmod(0o755)
    try:
        yield
    finally:
        policy.unlink()


def _namespaces_denied() -> str:
    """Return an error message if this machine does not allow namespaces, mounts or bridges, otherwise ""."""
    bridge = f"tk-{os.getpid()}"
    for command in (
        ["unshare", "--net", "--uts", "--ipc", "--mount", "--pid", "--fork", "--mount-proc", "true"],
        ["ip", "link", "add", bridge, "type", "bridge"],
        ["ip", "link", "delete", bridge],
    ):
        env = {**os.environ, "PATH": path_with_sbin()}
        done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=20)
        if done.returncode:
            return done.stderr.strip()
    return ""


def _apt_get(*args: str) -> str:
    """Run apt-get; return its output if it fails, otherwise ""."""
    options = (
        "--yes",
        "--quiet",
        "--no-install-recommends",
        "-o=Dpkg::Use-Pty=0",
        "-o=DPkg::Lock::Timeout=60",
    )
    try:
        done = subprocess.run(
            ["apt-get", *options, *args],
            env={**os.environ, "DEBIAN_FRONTEND": "noninteractive", "PATH": path_with_sbin()},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=INSTALL_TIMEOUT_S,
        )
    except subprocess.TimeoutExpired:
        return f"apt-get {args[0]} did not finish within {INSTALL_TIMEOUT_S} s"
    return done.stdout if done.returncode else ""


def _listed(packages: Sequence[str]) -> str:
    return f"{', '.join(packages)} {'is' if len(packages) == 1 else 'are'}"
