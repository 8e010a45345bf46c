"""Implements ``trainkit doctor``, which checks whether this machine or a cluster's nodes can run a job."""

from __future__ import annotations

import os
from collections.abc import Generator, Sequence
from contextlib import closing
from dataclasses import asdict, replace
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING

import click

from trainkit.cli import options
from trainkit.cli.help import as_command, option
from trainkit.cli.output import echo_json
from trainkit.errors import EXIT_FAILED, EXIT_OK
from trainkit.formats import plural
from trainkit.launch.config_request import ConfigRequest

if TYPE_CHECKING:
    from trainkit.config import LoadedConfig
    from trainkit.job.preflight import Finding

TIMEOUT_S = 600.0
MARKS = {"ok": "ok     ", "warning": "warning", "failure": "FAILURE"}


@as_command(
    "trainkit doctor --quick",
    "trainkit doctor --nodes 2 --gpus-per-node 4 --partition debug",
    "trainkit doctor --json",
)
@options.config_argument
@option("--quick", "Skip the slow checks: the import of torch, the bandwidth, and most of the write test.")
@options.set_option
@options.slurm_options
@options.shape_options
@option(
    "--run-dir",
    "Check the filesystem of this folder, where runs will be created.",
    type=click.Path(path_type=Path, file_okay=False),
    default=Path("runs"),
    show_default=True,
)
@options.json_option("trainkit.capabilities.doctor:CheckedJson")
def command(
    config: str | None,
    quick: bool,
    overrides: tuple[str, ...],
    nodes: int | None,
    gpus_per_node: int | None,
    run_dir: Path,
    as_json: bool,
    **slurm: object,
) -> int:
    """Check whether this machine, or with --nodes the nodes of a cluster, can run a job.

    The checks cover Python, torch, GPUs, host names, the network, ports, the disk, the clock, the bandwidth
    and the Slurm settings. With --nodes or inside an allocation, the checks run on all nodes at the same
    time, in a Slurm step that waits up to 10 minutes for nodes to become available. Each line of the output
    states the result of a check, and what to do if there is a problem. The exit code is 1 if a check fails;
    warnings do not affect the exit code.
    """
    from trainkit.job.signals import exit_on_stop

    if nodes is None and "SLURM_JOB_ID" in os.environ:
        nodes = int(os.environ.get("SLURM_JOB_NUM_NODES", "1"))
    flags = options.config_flags({"nodes": nodes, "gpus_per_node": gpus_per_node, **slurm})
    loaded = ConfigRequest(config or options.choose_config(), None, overrides, flags).load()
    found: list[Finding] = []
    with exit_on_stop(), closing(_checks(loaded, run_dir.absolute(), nodes, quick)) as checks:
        for of_nodes, group in groupby(checks, key=lambda check: check.host is not None):
            if of_nodes:  # the findings of all nodes arrive at the same time
                of_all = list(group)
                found += of_all
                if not as_json:
                    _echo_nodes(of_all)
                continue
            for check in group:
                found.append(check)
                if not as_json:
                    click.echo(_line(check))
    counts = {state: sum(check.state == state for check in found) for state in MARKS}
    if as_json:
        echo_json({"checks": [asdict(check) for check in found], **counts})
    else:
        warnings, failures = (plural(counts[state], state) for state in ("warning", "failure"))
        click.echo(f"{counts['ok']} ok, {warnings}, {failures}", err=True)
    return EXIT_FAILED if counts["failure"] else EXIT_OK


def _checks(
    loaded: LoadedConfig, folder: Path, nodes: int | None, quick: bool
) -> Generator[Finding, None, None]:
    from trainkit.capabilities.doctor import Request
    from trainkit.capabilities.doctor.environment import with_interpreter
    from trainkit.capabilities.doctor.node import node_findings
    from trainkit.capabilities.doctor.nodes import can_measure, check_nodes, local_bandwidth, slurm_checks
    from trainkit.cluster.discovery import has_slurm

    launch, on_cluster = loaded.config.launch, has_slurm()
    on_slurm = nodes is not None or (on_cluster and launch.backend != "local")
    request = Request(folder, launch.network, quick=quick)
    request, checks = with_interpreter(request, loaded, Path.cwd(), on_slurm=on_slurm)
    yield from checks
    if nodes is None:
        found = []
        for check in node_findings(request):
            found.append(check)
            yield check
        if not quick and can_measure(found):
            yield from local_bandwidth(request)
    else:
        yield from check_nodes(loaded, request, TIMEOUT_S)
    if on_cluster:
        yield from slurm_checks()


def _line(check: Finding) -> str:
    where = "" if check.host is None else f"{check.host}: "
    hint = f"\n         hint: {check.hint}" if check.hint else ""
    return f"{MARKS[check.state]}  {where}{check.name}: {check.value}{hint}"


def _echo_nodes(checks: Sequence[Finding]) -> None:
    """Print each passed check once for all nodes, and each problem once with the nodes that have it."""
    num_nodes = len({check.host for check in checks})
    for name in dict.fromkeys(check.name for check in checks):
        same = [check for check in checks if check.name == name]
        well = [check for check in same if check.state == "ok"]
        alike: dict[Finding, list[str]] = {}
        for check in same:
            if check.state != "ok":
                alike.setdefault(replace(check, host=None), []).extend([check.host] if check.host else [])
        for check, hosts in alike.items():
            click.echo(_line(replace(check, host=",".join(hosts) or None)))
        if len({check.value for check in well}) == 1 and len(well) > 1:
            nodes = f"all {num_nodes}" if len(well) == num_nodes else f"{len(well)} of {num_nodes}"
            click.echo(_line(replace(well[0], host=None, value=f"{well[0].value} on {nodes} nodes")))
        elif well:
            others = f"; {plural(len(well) - 1, 'other node')} ok, with different values" if well[1:] else ""
            click.echo(_line(replace(well[0], value=f"{well[0].value}{others}")))
