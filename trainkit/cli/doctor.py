"""``trainkit doctor``: whether this machine, or the nodes of a cluster, can run a job."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING

import click

from trainkit.cli.help import Command, examples
from trainkit.cli.options import (
    ConfigRequest,
    config_argument,
    json_option,
    set_option,
    shape_flags,
    shape_options,
    slurm_flags,
    slurm_options,
)
from trainkit.errors import EXIT_FAILED, EXIT_OK

if TYPE_CHECKING:
    from trainkit.config import LoadedConfig
    from trainkit.doctor.node import Check, Request

TIMEOUT_S = 600.0
MARKS = {"ok": "ok     ", "warning": "warning", "failure": "FAILURE"}


@click.command(
    cls=Command,
    epilog=examples(
        "trainkit doctor --quick",
        "trainkit doctor --nodes 2 --gpus-per-node 4 --partition debug",
        "trainkit doctor --json",
    ),
)
@config_argument
@click.option(
    "--quick", is_flag=True, help="Leave out what takes seconds: torch, and most of the write test."
)
@set_option
@slurm_options
@shape_options
@click.option(
    "--run-dir",
    type=click.Path(path_type=Path, file_okay=False),
    default=Path("runs"),
    show_default=True,
    help="Folder in which runs will be.",
)
@click.option("--port", type=click.IntRange(1, 65535), metavar="N", help="Port that must be free.")
@json_option
def command(
    config: str | None,
    quick: bool,
    overrides: tuple[str, ...],
    nodes: int | None,
    gpus_per_node: int | None,
    run_dir: Path,
    port: int | None,
    as_json: bool,
    **slurm: object,
) -> int:
    """Check this machine, or with --nodes the nodes of a cluster: can a job run here?

    Python, torch, GPUs, names, network, ports, disk, clock, bandwidth, and the settings of Slurm. With
    --nodes, or inside an allocation, the checks run on all nodes at once, in a step of Slurm that waits up to
    10 minutes for them. Each line says what was found and what to do. The exit code is 1 if there is a
    failure; warnings do not count.
    """
    from trainkit.doctor.node import Request

    if nodes is None and "SLURM_JOB_ID" in os.environ:
        nodes = int(os.environ.get("SLURM_JOB_NUM_NODES", "1"))
    flags = shape_flags(nodes, gpus_per_node) | slurm_flags(slurm)
    loaded = ConfigRequest(config or "shell", None, overrides, flags).load()
    request = Request(run_dir.absolute(), loaded.config.launch.network, (), port, quick)
    found: list[Check] = []
    for of_nodes, group in groupby(_checks(request, loaded, nodes), key=lambda check: check.host is not None):
        if of_nodes:  # they arrive together
            checks = list(group)
            found += checks
            if not as_json:
                _echo_nodes(checks)
            continue
        for check in group:
            found.append(check)
            if not as_json:
                click.echo(_line(check))
    counts = {state: sum(check.state == state for check in found) for state in MARKS}
    if as_json:
        click.echo(json.dumps({"checks": [check.to_dict() for check in found], **counts}, ensure_ascii=False))
    else:
        click.echo(f"{counts['ok']} ok, {counts['warning']} warnings, {counts['failure']} failures", err=True)
    return EXIT_FAILED if counts["failure"] else EXIT_OK


def _checks(request: Request, loaded: LoadedConfig, nodes: int | None) -> Iterator[Check]:
    from trainkit.cluster.discovery import has_slurm
    from trainkit.doctor.node import check_node
    from trainkit.doctor.nodes import check_nodes, local_bandwidth, slurm_checks, step_argv

    if nodes is None:
        yield from check_node(request)
        if not request.quick:
            yield from local_bandwidth(request)
    else:
        from trainkit.slurm.client import require_controller

        require_controller()
        argv = step_argv(loaded, request, TIMEOUT_S)
        yield from check_nodes(argv, nodes, TIMEOUT_S, measures=not request.quick)
    if has_slurm():
        yield from slurm_checks()


def _line(check: Check) -> str:
    where = "" if check.host is None else f"{check.host}: "
    hint = f"\n         hint: {check.hint}" if check.hint else ""
    return f"{MARKS[check.state]}  {where}{check.name}: {check.value}{hint}"


def _echo_nodes(checks: Sequence[Check]) -> None:
    """Print what is well once for all nodes, and what is not for each."""
    num_nodes = len({check.host for check in checks})
    for name in dict.fromkeys(check.name for check in checks):
        same = [check for check in checks if check.name == name]
        well = [check for check in same if check.state == "ok"]
        for check in same:
            if check.state != "ok":
                click.echo(_line(check))
        if len(well) == 1 or (well and len({check.value for check in well}) > 1):
            others = f"; {len(well) - 1} other nodes are ok" if len(well) > 1 else ""
            click.echo(_line(replace(well[0], value=f"{well[0].value}{others}")))
        elif well:
            nodes = f"all {num_nodes}" if len(well) == num_nodes else f"{len(well)} of {num_nodes}"
            click.echo(_line(replace(well[0], host=None, value=f"{well[0].value} on {nodes} nodes")))
