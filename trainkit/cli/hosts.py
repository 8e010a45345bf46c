"""`run` and `resume` on several hosts without Slurm, started by hand on each of them."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import click

from trainkit.errors import EXIT_FAILED, EXIT_INTERRUPTED, EXIT_OK, EXIT_STOPPED, TrainkitError

if TYPE_CHECKING:
    from trainkit.cluster.target import Target
    from trainkit.config import RunConfig
    from trainkit.job.node.static_rendezvous import HostLink, HostPlace
    from trainkit.plan.launch import LaunchPlan
    from trainkit.run.record import AttemptRecord
    from trainkit.run.rundir import RunDir

END_TIMEOUT_S = 60.0
"""How long after its own time limit node 0 may take to announce the attempt."""


def hosts_target(place: HostPlace) -> Target:
    """The hosts of a static rendezvous as a target."""
    from trainkit.cluster.target import Target

    reason = f"hosts: this is node {place.node_rank} of {place.num_nodes}, and node 0 is {place.master}"
    return Target("hosts", reason, per="node")


def facts_of(config: RunConfig, plan: LaunchPlan, **more: Any) -> dict[str, Any]:
    """What must be the same on every host: the values of the config, and what they start."""
    from trainkit.control.resume import flat_values

    shape = {"workers per node": plan.workers_per_node, "the device": plan.device}
    return {**flat_values(config), **shape, "the command": plan.command and list(plan.command), **more}


def run_on_hosts(
    place: HostPlace,
    plan: LaunchPlan,
    facts: Mapping[str, Any],
    start: Callable[[], tuple[RunDir, str, AttemptRecord]],
    is_new: bool,
) -> int:
    """Run this host's node of a run; returns the exit code, the same on every host.

    When all hosts have joined, node 0 calls `start`, which opens the attempt and returns its run, its name
    and its job.json entry. If a host then cannot take part, the folder of a run that `is_new` is removed.
    """
    from trainkit.job.hosts_run import prepare_process
    from trainkit.job.node.rendezvous import StopSignalReceived
    from trainkit.job.signals import signal_exit_code

    prepare_process()
    try:
        if place.node_rank == 0:
            return _run_first(place, plan, facts, start, is_new)
        return _run_other(place, facts)
    except StopSignalReceived as stop:
        click.echo(f"stopped by {stop} before the start", err=True)
        return signal_exit_code(stop.received)


def _run_first(
    place: HostPlace,
    plan: LaunchPlan,
    facts: Mapping[str, Any],
    start: Callable[[], tuple[RunDir, str, AttemptRecord]],
    is_new: bool,
) -> int:
    from trainkit.cli.following import kept_terminal, print_end, print_started, show_rank_0
    from trainkit.job.hosts_run import end_hosts, run_first_host
    from trainkit.job.node.rendezvous import StopSignalReceived
    from trainkit.job.node.static_rendezvous import HostListener, dismiss, stopped_error
    from trainkit.run.end import AttemptEnd, read_end

    listener = HostListener(place, facts)
    if place.num_nodes > 1:
        last = place.num_nodes - 1
        others = "node rank 1" if last == 1 else f"node ranks 1 to {last}"
        click.echo(f"waiting at {place.master} for {others}", err=True)
    links = listener.await_hosts()
    try:
        run, name, entry = start()
        attempt = run.attempt(entry.attempt)
        found = _announce(run, entry.attempt, plan, place, links, is_new)
    except TrainkitError as error:
        dismiss(links.values(), error)
        raise
    except StopSignalReceived as stop:
        dismiss(links.values(), stopped_error(stop))
        raise
    print_started(run, name, entry, plan.backend, as_json=False)
    with kept_terminal() as terminal:
        decision, stop_signal = run_first_host(
            found, plan, place, links, lambda attempt, ended: show_rank_0(attempt, ended, terminal)
        )
    code = EXIT_OK if decision.exit_code in (EXIT_OK, EXIT_STOPPED) else EXIT_FAILED
    code = EXIT_INTERRUPTED if stop_signal == "SIGINT" else code
    end = read_end(attempt) or AttemptEnd()
    end_hosts(links, f"{end.state or decision.action}: {decision.reason}", code)
    print_end(run)
    return code


def _announce(
    run: RunDir, number: int, plan: LaunchPlan, place: HostPlace, links: Mapping[int, HostLink], is_new: bool
) -> Any:
    from trainkit.job.hosts_run import abandon, announce

    try:
        return announce(run.attempt(number), plan, place, links)
    except BaseException as error:
        if is_new:
            shutil.rmtree(run.path, ignore_errors=True)
        else:
            abandon(run.attempt(number), f"not started: {error}")
        raise


def _run_other(place: HostPlace, facts: Mapping[str, Any]) -> int:
    from trainkit.job.hosts_run import HostWatch, await_attempt
    from trainkit.job.node.rendezvous import RENDEZVOUS_TIMEOUT_S
    from trainkit.job.node.static_rendezvous import join

    click.echo(f"joining node 0 at {place.master} as node {place.node_rank}", err=True)
    link = join(place, facts)
    click.echo("joined; the run starts when all hosts have", err=True)
    found = await_attempt(link, RENDEZVOUS_TIMEOUT_S + END_TIMEOUT_S)
    click.echo(found.run_dir)
    watch = HostWatch(found, place, link)
    watch.run()
    end = watch.await_end()
    click.echo(end["text"], err=True)
    return int(end["exit_code"])
