"""``trainkit drill``: a fire drill."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from trainkit.cli.options import (
    ConfigRequest,
    WithTrailingCommand,
    config_options,
    examples,
    json_option,
    launcher_option,
    trailing_command,
)
from trainkit.drill.campaign import DEFAULT_STEPS, FEWEST_STEPS
from trainkit.drill.scenarios import NAMES
from trainkit.errors import EXIT_FAILED, EXIT_OK, UsageError

if TYPE_CHECKING:
    from trainkit.config import LoadedConfig
    from trainkit.config.changes import Change
    from trainkit.drill.scenarios import Scenario
    from trainkit.drill.verdict import Result
    from trainkit.plan.launch import LaunchPlan


@click.command(
    cls=WithTrailingCommand,
    epilog=examples(
        "trainkit drill --list",
        "trainkit drill quickstart --nodes 2 --only signal --only rank",
        "trainkit drill quickstart --nodes 2 --only signal --json",
    ),
)
@config_options
@launcher_option
@click.option(
    "--steps",
    type=click.IntRange(min=FEWEST_STEPS),
    metavar="N",
    help=f"Steps of every run; default: {DEFAULT_STEPS}.",
)
@click.option("--seed", type=int, default=0, metavar="N", help="Chooses the moments and the victims.")
@click.option(
    "--only",
    type=click.Choice(NAMES),
    multiple=True,
    metavar="NAME",
    help="Interrupt only in this way; repeatable.",
)
@click.option(
    "--list", "only_list", is_flag=True, help="List the ways and which can be tried here; run nothing."
)
@json_option
def command(
    request: ConfigRequest,
    launcher: str,
    steps: int | None,
    seed: int,
    only: tuple[str, ...],
    only_list: bool,
    as_json: bool,
) -> int:
    """Train CONFIG for a short while, interrupt it in every way that can be tried here, and hold the losses
    against those of a run that nobody touched.

    The runs lie in a folder of their own, runs/drill-TIME; nothing else is touched. Exit code 0 only when all
    that was tried holds. Only the built-in trainer is shortened: a COMMAND needs a short run of its own.
    Ctrl-C cancels the run that goes on.
    """
    from trainkit.cli.launch import plan_for
    from trainkit.cluster.target import make_target
    from trainkit.drill.campaign import shorten
    from trainkit.drill.scenarios import chosen, why_not

    argv = trailing_command()
    _refuse_misfits(argv, launcher, steps)
    loaded = request.load()
    target = make_target(loaded)
    plan = plan_for(loaded, argv, launcher, target)
    changes: list[Change] = []
    if argv is None:
        loaded, changes = shorten(loaded, steps or DEFAULT_STEPS, plan.device)
        plan = plan_for(loaded, argv, launcher, target)
    scenarios = chosen(only)
    reasons = {scenario.name: why_not(scenario, loaded.config, plan) for scenario in scenarios}
    if only_list:
        return _list(scenarios, reasons, as_json)
    if all(reasons.values()):
        raise UsageError(
            "none of these can be tried here: "
            + "; ".join(f"{name}: {why}" for name, why in reasons.items()),
            hint="`--list` shows all",
        )
    return _drill(loaded, plan, scenarios, changes, seed, as_json)


def _refuse_misfits(argv: Sequence[str] | None, launcher: str, steps: int | None) -> None:
    if argv is None and launcher != "python":
        raise UsageError(f"--launcher {launcher} is for a COMMAND", hint="add: -- train.py …")
    if argv is not None and steps is not None:
        raise UsageError(
            f"--steps {steps} is for the built-in trainer: how long a COMMAND runs is its own business",
            hint="tell the COMMAND itself, as in: -- python train.py --steps 200",
        )


def _list(scenarios: Sequence[Scenario], reasons: dict[str, str], as_json: bool) -> int:
    from trainkit.tables import table

    if as_json:
        value = [
            {"scenario": item.name, "does": item.does, "why_not_here": reasons[item.name] or None}
            for item in scenarios
        ]
        click.echo(json.dumps(value, ensure_ascii=False))
        return EXIT_OK
    rows = [
        [item.name, item.does, "no: " + reasons[item.name] if reasons[item.name] else "yes"]
        for item in scenarios
    ]
    click.echo(table([["scenario", "does", "can be tried here"], *rows]))
    return EXIT_OK


def _drill(
    loaded: LoadedConfig,
    plan: LaunchPlan,
    scenarios: Sequence[Scenario],
    changes: Sequence[Change],
    seed: int,
    as_json: bool,
) -> int:
    from trainkit.cli.launch import start_new_run
    from trainkit.control.run_registry import isolated_state
    from trainkit.drill.campaign import REFERENCE, Campaign, make_folder
    from trainkit.drill.verdict import all_hold, result_table, summary
    from trainkit.plan.launch import describe_plan
    from trainkit.rundir import RunDir, write_json

    def say(text: str) -> None:
        click.echo(text, err=True)

    def start(folder: Path) -> RunDir:
        again = folder.name != REFERENCE
        return start_new_run(loaded, plan, str(folder), "submit", quiet=again)[0]

    say(describe_plan(plan, loaded.config.name))
    for change in changes:
        say(f"  drill               {change.sentence}")
    folder = make_folder()
    interval = loaded.config.checkpoint.every_steps if plan.command is None else None
    campaign = Campaign(folder, loaded.config, plan, seed, interval, start, say)
    results: list[Result] = []
    try:
        with isolated_state(folder):
            for result in campaign.carry_out(scenarios):
                results.append(result)
                say(f"{result.scenario}: {result.sentence}")
    finally:
        say(f"the runs lie in {folder}; `trainkit status {folder}/NAME` shows one")
    value: dict[str, Any] = {
        "folder": str(folder),
        "seed": seed,
        "holds": all_hold(results),
        "changes": [change.to_dict() for change in changes],
        "scenarios": [result.to_dict() for result in results],
    }
    write_json(folder / "drill.json", value)
    if as_json:
        click.echo(json.dumps(value, ensure_ascii=False))
    else:
        click.echo(f"{result_table(results)}\n\n{summary(results)}")
    return EXIT_OK if value["holds"] else EXIT_FAILED
