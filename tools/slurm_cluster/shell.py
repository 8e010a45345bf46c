"""Open an interactive shell in a cluster that is removed when the shell exits (`make cluster`)."""

from __future__ import annotations

import contextlib
import os
import shlex
import signal
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from types import FrameType

from tools.slurm_cluster import cluster as clusters
from tools.slurm_cluster.cluster import Cluster
from tools.slurm_cluster.processes import Pid

ENDING = (signal.SIGHUP, signal.SIGTERM)
WELCOME = """
A Slurm cluster of {num} hosts, up after {seconds:.1f} s; this machine is its login node, you are root.

  sinfo                                        list hosts and partitions: low (default), high, debug
  srun -N4 --ntasks-per-node=2 hostname        run eight tasks on four hosts
  trainkit --help                              list trainkit's commands
  {mine} run --host 2 -- ps -e
  {mine} --help             more

Leave with `exit` or Ctrl-D; this removes the cluster and all its jobs. Its folder, with all logs: {folder}
"""


def run_shell_in_new_cluster(
    accounting: bool, options: Mapping[str, str], slurm: str | None, with_cgroups: bool
) -> None:
    """Start a cluster, run $SHELL in it, and remove it, even after SIGTERM or when the terminal closes."""
    for number in ENDING:
        signal.signal(number, _leave)
    print("starting a Slurm cluster …", file=sys.stderr)
    cluster = clusters.up(
        None, accounting, options, owner=Pid.of(os.getpid()), slurm=slurm, with_cgroups=with_cgroups
    )
    try:
        mine = f"{shlex.quote(sys.executable)} -m tools.slurm_cluster"
        seconds = cluster.state.up_s
        welcome = WELCOME.format(num=len(cluster.hosts), seconds=seconds, folder=cluster.folder, mine=mine)
        print(welcome, flush=True)
        _run_shell(cluster)
    finally:
        for number in ENDING:
            signal.signal(number, signal.SIG_IGN)
        with contextlib.suppress(OSError):  # the terminal may be closed
            print("removing the cluster …", file=sys.stderr)
        cluster.down()


def _run_shell(cluster: Cluster) -> None:
    def child() -> None:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, (signal.SIGINT, *ENDING))

    # Ignore Ctrl-C, which is meant for the programs in the shell.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # Block signals, because a signal between the fork and the assignment to `shell` would leave the shell
    # running.
    signal.pthread_sigmask(signal.SIG_BLOCK, ENDING)
    environ = {**cluster.environ, "PS1": f"({cluster.name}) $ "}
    shell = subprocess.Popen(_command(cluster), env=environ, preexec_fn=child)
    try:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, ENDING)
        shell.wait()
    finally:
        if shell.poll() is None:
            Pid.of(shell.pid).stop(timeout_s=2, number=signal.SIGHUP)


def _command(cluster: Cluster) -> list[str]:
    """Return the argv of the shell; bash also gets a prompt with the cluster's name."""
    program = os.environ.get("SHELL") or "/bin/sh"
    if Path(program).name != "bash":
        return [program]
    rc = cluster.folder / "etc/bashrc"
    exports = "".join(f"export {name}={shlex.quote(value)}\n" for name, value in cluster.variables.items())
    # The variables are set after ~/.bashrc, because ~/.bashrc may set PATH and the prompt.
    rc.write_text(f'[ -e ~/.bashrc ] && . ~/.bashrc\n{exports}PS1="({cluster.name}) $PS1"\n')
    return [program, "--rcfile", str(rc)]


def _leave(number: int, frame: FrameType | None) -> None:
    raise SystemExit(128 + number)
