"""`run` and `resume` on several hosts without Slurm, started by hand on each of them."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import click

from trainkit import __version__
from trainkit.cli.help import option
from trainkit.cli.logs import kept_terminal, print_end, show_rank_0
from trainkit.cli.options import combined
from trainkit.cli.started import print_started
from trainkit.errors import UsageError
from trainkit.job import step_run
from trainkit.job.failure.records import record_refusal
from trainkit.job.node.host_rendezvous import refuse_wrong_master
from trainkit.job.node.rendezvous import LOCAL_ADDR, HostPlace, await_plan
from trainkit.plan.launch import LaunchPlan
from trainkit.run.record import AttemptRecord
from trainkit.run.rundir import AttemptDir, RunDir, become_sole_supervisor, claim_place

if TYPE_CHECKING:
    from trainkit.cluster.target import Target
    from trainkit.config import RunConfig

MAX_DIFFERENCES = 5
LOCK_TIMEOUT_S = 10.0


host_options = combined(
    option(
        "--node-rank I",
        "Node rank of this host, from 0; start the same command on every host.",
        type=click.IntRange(min=0),
    ),
    option("--master-addr HOST", "Address of the host with --node-rank 0."),
    option(
        "--master-port PORT",
        "Free port of that host, the same on every host.",
        type=click.IntRange(1, 65_535),
    ),
)


def host_place(
    flags: Mapping[str, tuple[str, object]],
    node_rank: int | None,
    master_addr: str | None,
    master_port: int | None,
) -> HostPlace | None:
    """The place of this host among the hosts of ``--nodes``, one of the `flags`; None without `host_options`.

    Raises UsageError when some are missing or the node rank is not one of the nodes.
    """
    given: dict[str, object] = {
        "--node-rank": node_rank,
        "--master-addr": master_addr,
        "--master-port": master_port,
    }
    if all(value is None for value in given.values()):
        return None
    nodes = flags.get("resources.nodes", ("", None))[1]
    hint = (
        "every host needs --nodes N --node-rank I --master-addr HOST --master-port PORT, "
        "with its own I from 0 to N-1"
    )
    if isinstance(nodes, str):  # such as 2-4
        raise UsageError(f"--nodes {nodes} is not a number of hosts", hint=hint)
    given = {"--nodes": nodes, **given}
    missing = [name for name, value in given.items() if value is None]
    if not isinstance(nodes, int) or node_rank is None or not master_addr or master_port is None:
        typed = " ".join(f"{name} {value}" for name, value in given.items() if value is not None)
        raise UsageError(
            f"{typed}: {', '.join(missing) or '--master-addr'} {'are' if len(missing) > 1 else 'is'} missing",
            hint=hint,
        )
    if node_rank >= nodes:
        raise UsageError(
            f"--node-rank {node_rank} is not one of {nodes} nodes",
            hint=f"node ranks are numbered from 0 to {nodes - 1}; --nodes sets how many there are",
        )
    addr = LOCAL_ADDR if master_addr == "localhost" else master_addr
    return HostPlace(node_rank, nodes, addr, master_port)


def hosts_target(place: HostPlace) -> Target:
    """The hosts that are started by hand as a target."""
    from trainkit.cluster.target import Target

    reason = f"hosts: this is node {place.node_rank} of {place.num_nodes}; {place.first}"
    return Target("hosts", reason, per="node", finds_cluster=False)


def run_on_hosts(
    place: HostPlace,
    config: RunConfig,
    plan: LaunchPlan,
    folder: Path,
    named: str | None,
    start: Callable[[], tuple[RunDir, str, AttemptRecord]],
) -> int:
    """Run this host's node of a run in `folder`, the one of a name if it is `named`; returns the exit code.

    Node 0 calls `start`, which opens the attempt and returns its run, its name and its job.json entry. The
    others take part in the attempt that it announces if their own config and plan are the same. All hosts
    return the same code.
    """
    if place.node_rank == 0:
        refuse_wrong_master(place)
        run, name, entry = start()
        attempt = run.attempt(entry.attempt)
        # Before the lock, with which an older announcement would count.
        step_run.announce(folder, place, attempt)
        become_sole_supervisor(run, LOCK_TIMEOUT_S)
        claim_place(attempt, 0)
        print_started(run, name, entry, plan.backend, as_json=False)
        if place.others:
            click.echo(f"waiting for node rank {', '.join(map(str, place.others))}", err=True)
        with kept_terminal() as terminal:
            step_run.run_first_task(
                attempt, plan, lambda attempt, ended: show_rank_0(attempt, ended, terminal), place
            )
        step_run.withdraw(folder, place)
    else:
        attempt = _join(place, config, plan, folder, named)
        click.echo(str(attempt.run.path))
        with kept_terminal():
            step_run.run_host(attempt, plan, place)
            step_run.await_end(attempt, place)
    return step_run.exit_code_of(attempt, print_end(attempt.run))


def _join(
    place: HostPlace, config: RunConfig, plan: LaunchPlan, folder: Path, named: str | None
) -> AttemptDir:
    """The attempt that node 0 has announced, in which this host has claimed its place.

    Raises UsageError if the place is taken, and for another config or plan; the start then fails on all.
    """
    from trainkit.config import read_effective

    click.echo(f"joining {place.first} as node {place.node_rank}", err=True)
    attempt, version = step_run.await_first_host(folder, place, named)
    claim_place(attempt, place.node_rank)  # before anything is recorded there
    theirs = _facts(read_effective(attempt.config_file), await_plan(attempt), version)
    ours = _facts(config, plan, __version__)
    different = [
        f"{key} is {json.dumps(ours.get(key))} there and {json.dumps(theirs.get(key))} on node 0"
        for key in sorted(ours.keys() | theirs.keys())
        if ours.get(key) != theirs.get(key)
    ]
    if different:
        more = "" if len(different) <= MAX_DIFFERENCES else f" and {len(different) - MAX_DIFFERENCES} more"
        error = UsageError(
            f"node {place.node_rank} differs from node 0: {'; '.join(different[:MAX_DIFFERENCES])}{more}",
            hint="start the same command with the same config on every host",
        )
        record_refusal(attempt, plan.first_rank_of(place.node_rank), place.node_rank, error)
        raise error
    return attempt


def _facts(config: RunConfig, plan: LaunchPlan, version: str) -> dict[str, object]:
    """What must be the same on every host."""
    from trainkit.control.changed_config import flat_values

    shape = {"workers per node": plan.workers_per_node, "the device": plan.device}
    command = plan.command and list(plan.command)
    return {**flat_values(config), **shape, "the command": command, "trainkit": version}
