"""The Debian packages of a cluster: what is missing, and installing just that."""

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
"""The programs of each package: where they are there, it does not matter who brought them."""
POLICY = Path("/usr/sbin/policy-rc.d")
INSTALL_TIMEOUT_S = 600


class NotPossible(Exception):
    """A cluster cannot run on this machine; `hint` says what would help."""

    def __init__(self, what: str, hint: str) -> None:
        super().__init__(what)
        self.hint = hint


def missing() -> list[str]:
    """The packages of which a program is not there, in a fixed order."""
    path = path_with_sbin()
    return [
        package
        for package, programs in PROGRAMS.items()
        if not all(shutil.which(program, path=path) for program in programs)
    ]


def require() -> None:
    """Raise NotPossible unless a cluster can be started now."""
    if os.geteuid() != 0:
        raise NotPossible("only root can make its hosts, which are namespaces", "do it as root")
    if packages := missing():
        raise NotPossible(
            f"{_listed(packages)} not installed",
            f"type: apt-get update && apt-get install --no-install-recommends {' '.join(packages)}",
        )
    if reason := _namespaces_denied():
        raise NotPossible(
            f"this machine does not let root make hosts: {reason}", "in a container, it takes --privileged"
        )


def install_missing() -> None:
    """Install what is missing and say so; no daemon is started. Raises NotPossible."""
    packages = missing()
    if os.geteuid() != 0 or (packages and shutil.which("apt-get") is None):
        require()
    if not packages:
        return
    print(f"installing {' '.join(packages)}, for the tests on a Slurm cluster", file=sys.stderr)
    with no_daemons_started():
        # The lists of a fresh image are empty, and those of an old one name files that are gone.
        for args in (("install", *packages), ("update",), ("install", *packages)):
            failure = _apt_get(*args)
            if args[0] == "install" and not failure:
                break
        else:
            print(failure, file=sys.stderr)
            raise NotPossible(
                f"{_listed(packages)} not installed, and apt-get fails", "see what it said above"
            )
    require()


@contextlib.contextmanager
def no_daemons_started(policy: Path = POLICY) -> Iterator[None]:
    """Debian starts a daemon when its package is installed, unless this file forbids it."""
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
    """What the machine says when it does not allow namespaces, mounts or bridges; empty when it does."""
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
    """What it printed if it failed, and nothing if it did not."""
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
        return f"apt-get {args[0]} was not done after {INSTALL_TIMEOUT_S} s"
    return done.stdout if done.returncode else ""


def _listed(packages: Sequence[str]) -> str:
    return f"{', '.join(packages)} {'is' if len(packages) == 1 else 'are'}"
