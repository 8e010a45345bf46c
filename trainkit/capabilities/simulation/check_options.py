"""Implements the options for `trainkit check --simulate-world`."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import asdict

import click

from trainkit.cli.help import AddedOption, option
from trainkit.cli.options import COUNT, INDEX, OutputOption
from trainkit.cli.output import json_text
from trainkit.errors import UsageError
from trainkit.launch.config_request import ConfigRequest


def simulation_options(function: Callable[..., object]) -> Callable[..., object]:
    """Add the simulation options to `trainkit check`; a simulation replaces the usual checks."""

    @functools.wraps(function)
    def with_simulation(
        request: ConfigRequest, world_size: int | None, rank: int | None, as_json: bool, **others: object
    ) -> object:
        if world_size is None and rank is not None:
            raise UsageError("--rank requires --simulate-world", hint="add --simulate-world N")
        if world_size is None:
            return function(request=request, as_json=as_json, **others)
        if others["estimate"] is not None or others["show_origin"] or others.get("choices"):
            from trainkit.cluster.limits import listed

            params = click.get_current_context().command.params
            added = (param.opts[0] for param in params if isinstance(param, AddedOption))
            raise UsageError(
                f"--simulate-world conflicts with {listed(['--estimate', '--show-origin', *added])}",
                hint="to use these options, run `trainkit check` without --simulate-world",
            )
        # Import this module here, to keep `trainkit check --help` fast.
        from trainkit.capabilities.simulation.simulated_job import simulate, simulated_plan, simulation_lines

        loaded = request.load()
        plan = simulated_plan(loaded, world_size)
        found = simulate(loaded, plan, rank or 0)
        if as_json:
            click.echo(json_text({"plan": plan.to_dict(), "simulation": asdict(found)}))
        else:
            click.echo(f"layout: {plan.reasons['layout']}")
            click.echo("\n".join(simulation_lines(found)))
        return None

    world_option = option(
        "--simulate-world N",
        "Check the config as if the run had N GPUs, and simulate one rank's step without allocating memory.",
        name="world_size",
        cls=OutputOption,
        output="trainkit.capabilities.simulation.simulated_job:SimulatedJson",
        type=COUNT,
    )
    rank_option = option("--rank N", "Rank to simulate; default: 0.", type=INDEX)
    typed: Callable[..., object] = world_option(rank_option(with_simulation))
    return typed
