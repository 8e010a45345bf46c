"""Implements the subcommands of `python -m tools.slurm_cluster`, such as up, run and down."""

from __future__ import annotations

import argparse
import os
import shlex
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from tools.slurm_cluster import cluster as clusters
from tools.slurm_cluster import lifecycle, packages, releases, shell
from tools.slurm_cluster.cluster import Cluster
from tools.slurm_cluster.state import all_states

USAGE = 2
EXAMPLES = """\
examples:
  python -m tools.slurm_cluster up                        start a cluster and print its folder
  python -m tools.slurm_cluster up --slurm 24.11          another version of Slurm than the installed one
  eval "$(python -m tools.slurm_cluster env)"             use it in this shell
  python -m tools.slurm_cluster run -- srun -N4 hostname  run one command in it
  python -m tools.slurm_cluster run --host 2 -- df /var/tmp
  python -m tools.slurm_cluster host kill 3               power off host 3; also revive, cut-off, reconnect
  python -m tools.slurm_cluster daemon stop slurmdbd      stop accounting, so that sacct fails
  python -m tools.slurm_cluster down                      remove the cluster
  python -m tools.slurm_cluster shell                     open a shell in a new cluster, removed on exit
"""
HOST_ACTIONS = {
    "kill": Cluster.kill_host,
    "revive": Cluster.revive_host,
    "cut-off": Cluster.cut_off,
    "reconnect": Cluster.reconnect,
}
DAEMON_ACTIONS = {
    ("stop", "slurmctld"): Cluster.stop_slurmctld,
    ("start", "slurmctld"): Cluster.start_slurmctld,
    ("stop", "slurmdbd"): Cluster.stop_accounting,
    ("start", "slurmdbd"): Cluster.start_accounting,
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run one subcommand; return its exit code."""
    options = _parser().parse_args(argv)
    try:
        code: int = options.call(options)
    except packages.NotPossible as error:
        print(f"error: {error}\n\nhint: {error.hint}", file=sys.stderr)
        return USAGE
    except (RuntimeError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return code


def _up(options: argparse.Namespace) -> int:
    releases.require(options.slurm)
    cluster = clusters.up(
        options.folder,
        not options.no_accounting,
        dict(options.set),
        slurm=options.slurm,
        with_cgroups=options.cgroups,
    )
    print(f"{cluster.name} is up after {cluster.state.up_s:.1f} s: {cluster.folder}", file=sys.stderr)
    print(f'use it: eval "$(python -m tools.slurm_cluster env --folder {cluster.folder})"', file=sys.stderr)
    print(cluster.folder)
    return 0


def _down(options: argparse.Namespace) -> int:
    lifecycle.clean_up()
    if options.all:
        for state in all_states():
            lifecycle.take_down(state)
    elif chosen := _choose(options.folder, must_exist=False):
        chosen.down()
    return 0


def _status(options: argparse.Namespace) -> int:
    for state in all_states():
        left = " (abandoned: the next `up` removes it)" if state.abandoned else ""
        running = [name for name, pid in state.processes.items() if pid.alive()]
        print(f"{state.name} {state.folder}{left}\n  running: {' '.join(running) or 'nothing'}")
    if not all_states():
        print("no cluster is running")
    return 0


def _env(options: argparse.Namespace) -> int:
    for name, value in _choose(options.folder).variables.items():
        print(f"export {name}={shlex.quote(value)}")
    return 0


def _run(options: argparse.Namespace) -> int:
    cluster = _choose(options.folder)
    line = cluster.command_line(options.command, options.host, str(Path.cwd()))
    return subprocess.run(line, env=cluster.environ).returncode


def _host(options: argparse.Namespace) -> int:
    HOST_ACTIONS[options.what](_choose(options.folder), options.number)
    return 0


def _daemon(options: argparse.Namespace) -> int:
    DAEMON_ACTIONS[options.what, options.name](_choose(options.folder))
    return 0


def _shell(options: argparse.Namespace) -> int:
    releases.require(options.slurm)
    shell.run_shell_in_new_cluster(
        not options.no_accounting, dict(options.set), options.slurm, options.cgroups
    )
    return 0


def _install(options: argparse.Namespace) -> int:
    """Install missing packages; on failure, return 1 only in CI, because tests are otherwise skipped."""
    try:
        releases.install(options.slurm)
    except packages.NotPossible as error:
        which = f"Slurm {options.slurm}" if options.slurm else "a Slurm cluster"
        print(f"the tests on {which} will be skipped: {error}", file=sys.stderr)
        return 1 if os.environ.get("CI") == "true" else 0
    return 0


def _choose(folder: Path | None, must_exist: bool = True) -> Any:
    """Return the cluster in the folder, this shell's cluster, or the only cluster.

    If there is none, returns None, or raises RuntimeError if `must_exist` is true.
    """
    named = folder or (Path(os.environ["TEST_CLUSTER"]) if "TEST_CLUSTER" in os.environ else None)
    states = [state for state in all_states() if named is None or state.path == named.absolute()]
    if len(states) > 1:
        folders = " ".join(state.folder for state in states)
        raise RuntimeError(f"there are {len(states)} clusters; choose one with --folder: {folders}")
    if not states and must_exist:
        raise RuntimeError(f"no cluster is running{f' in {named}' if named else ''}; start one with `up`")
    return Cluster(states[0]) if states else None


def _assignment(text: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not (name and equals):
        raise argparse.ArgumentTypeError(f"{text!r} is not NAME=VALUE")
    return name, value


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m tools.slurm_cluster",
        description=__doc__,
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    version, which, make = (argparse.ArgumentParser(add_help=False) for _ in range(3))
    which_version = f"{', '.join(releases.RELEASES)}; default: the one installed on this machine"
    version.add_argument("--slurm", metavar="VERSION", choices=releases.RELEASES, help=which_version)
    which.add_argument("--folder", type=Path, help="folder of the cluster; required if several clusters run")
    make.add_argument("--no-accounting", action="store_true", help="a cluster without slurmdbd")
    line = {"action": "append", "default": [], "type": _assignment, "metavar": "NAME=VALUE"}
    make.add_argument("--set", **line, help="a line of slurm.conf")
    confine = "confine jobs to their CPUs and memory (needs cgroup v1)"
    make.add_argument("--cgroups", action="store_true", help=confine)

    def command(
        call: Callable[..., int], text: str, *parents: argparse.ArgumentParser
    ) -> argparse.ArgumentParser:
        made = commands.add_parser(call.__name__.strip("_"), parents=parents, help=text)
        made.set_defaults(call=call)
        return made

    up = command(_up, "start a cluster and print its folder", make, version)
    up.add_argument("folder", nargs="?", type=Path, help="an empty folder; default: a new one below /tmp")
    down = command(_down, "remove a cluster if it exists", which)
    down.add_argument("--all", action="store_true", help="all clusters on this machine")
    command(_status, "list the clusters on this machine")
    command(_env, "print the export statements for a shell", which)
    run = command(_run, "run a command on the login node or on a host", which)
    run.add_argument("--host", type=int, help="the number of the host, from 1; default: the login node")
    run.add_argument("command", nargs="+")
    host = command(_host, "kill, revive, cut off or reconnect a host", which)
    host.add_argument("what", choices=HOST_ACTIONS)
    host.add_argument("number", type=int, help="the number of the host, from 1")
    daemon = command(_daemon, "stop or start the scheduler or accounting", which)
    daemon.add_argument("what", choices=("stop", "start"))
    daemon.add_argument("name", choices=("slurmctld", "slurmdbd"))
    command(_shell, "open a shell in a new cluster, removed on exit", make, version)
    command(_install, "install missing Debian packages", version)
    return parser
